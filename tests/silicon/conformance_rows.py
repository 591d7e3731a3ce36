"""`make conformance`, first part: every row on the real pyxrt and on the twin, one test per row.

Not collected by name: it needs the sandbox (root, network on first use). `NPU_RECORD=1` writes what the real
library gives to recorded/ instead of trusting the record.
"""

from __future__ import annotations

import json
import os

import conformance
import pytest
import xrt_sandbox

ALL = conformance.load_rows()


@pytest.fixture(scope="module")
def real(sandbox: xrt_sandbox.Sandbox) -> conformance.Outcomes:
    command = ["python3", "/project/tests/silicon/tools/probe.py", "pyxrt", "/standin"]
    done = sandbox.run([*command, "/project/tests/silicon/rows"], timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    if os.environ.get("NPU_RECORD") == "1":
        record = {"xrt": sandbox.xrt_version, **result}
        conformance.RECORDED.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    groups: conformance.Outcomes = result["groups"]
    return groups


@pytest.fixture(scope="module")
def twin(real: conformance.Outcomes, sandbox: xrt_sandbox.Sandbox, say: list[str]) -> conformance.Outcomes:
    outcomes = conformance.twin_outcomes()
    say.append(conformance.summary(ALL, real, outcomes, f"pyxrt {sandbox.xrt_version}"))
    return outcomes


@pytest.fixture(scope="module")
def listed() -> set[str]:
    return conformance.deviation_ids()


@pytest.mark.parametrize("row", ALL, ids=[row.id for row in ALL])
def test_row(
    row: conformance.Row, real: conformance.Outcomes, twin: conformance.Outcomes, listed: set[str]
) -> None:
    problem = conformance.judge(row, real, twin, listed)
    assert not problem, problem


def test_the_record_is_true(real: conformance.Outcomes) -> None:
    """What the ordinary test run trusts is what the real library gives today."""
    recorded = conformance.recorded_outcomes()
    chance = {(row.group, row.code) for row in ALL if row.deviation == "set-arg-range"}
    changed = [
        f"{group}: {code}\n  recorded: {recorded[group].get(code)}\n  now: {outcome}"
        for group, rows in real.items()
        for code, outcome in rows.items()
        if recorded[group].get(code) != outcome and (group, code) not in chance
    ]
    assert not changed, "\n".join(changed)
