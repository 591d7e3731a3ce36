"""The twin against what the real pyxrt 2.25.0 gave when the rows were recorded; needs no XRT.

`make conformance` runs the same rows on the real library and so checks the record, too.
"""

from __future__ import annotations

from pathlib import Path

import conformance
import pytest

ALL = conformance.load_rows()


@pytest.fixture(scope="module")
def twin(say: list[str]) -> conformance.Outcomes:
    outcomes = conformance.twin_outcomes()
    say.append(conformance.summary(ALL, conformance.recorded_outcomes(), outcomes, "recorded XRT 2.25.0"))
    return outcomes


def test_twin_is_as_recorded(twin: conformance.Outcomes) -> None:
    listed, real = conformance.deviation_ids(), conformance.recorded_outcomes()
    problems = [conformance.judge(row, real, twin, listed) for row in ALL]
    assert not any(problems), "\n".join(filter(None, problems))


def test_the_record_has_exactly_the_rows() -> None:
    recorded = {(group, code) for group, rows in conformance.recorded_outcomes().items() for code in rows}
    assert recorded == {(row.group, row.code) for row in ALL}


PLANTED = {
    "signature": (
        "from npu_twin import pyxrt; from npu_twin._xrt import buffer; o = buffer._write._overloads; "
        "o[0] = o[0]._replace(parameters=o[0].parameters[:1])",
        "signatures: bo(64).write(*NINE)",
    ),
    "enum value": (
        "from npu_twin import pyxrt; S = pyxrt.ert_cmd_state; S._members['ERT_CMD_STATE_ABORT'] = 7; "
        "S.ERT_CMD_STATE_ABORT._value = 7",
        "enums: pyxrt.ert_cmd_state.__members__",
    ),
    "error text": (
        "from npu_twin._xrt import device; device._LOAD_FAILED = 'cannot load'",
        "device: d.load_xclbin(pyxrt.xclbin())",
    ),
    "return type": (
        "from npu_twin import pyxrt; pyxrt.bo.read = lambda self, size, offset: bytes(size)",
        "buffers: type(b.read(4, 0))",
    ),
    "state": (
        "from npu_twin._xrt import run; run.TIMEOUT = 5",
        "runs: never(); r = run(); r.start(); r.wait(20), r.state(), r.wait(20)",
    ),
}


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_shows(defect: str, tmp_path: Path) -> None:
    """Change one thing of the twin: the row that is about it fails."""
    prelude, expected = PLANTED[defect]
    group = expected.partition(": ")[0]
    (tmp_path / f"{group}.rows").write_bytes((conformance.ROWS / f"{group}.rows").read_bytes())
    rows = [row for row in ALL if row.group == group]
    outcomes = conformance.twin_outcomes(tmp_path, prelude=prelude)
    real, listed = conformance.recorded_outcomes(), conformance.deviation_ids()
    failing = {row.id for row in rows if conformance.judge(row, real, outcomes, listed)}
    assert expected in failing


def test_an_unlisted_deviation_is_no_excuse() -> None:
    row = conformance.Row("g", "x", "made-up", ".*")
    assert "does not list" in conformance.judge(row, {"g": {"x": "1"}}, {"g": {"x": "2"}}, {"poison"})
    row = conformance.Row("g", "x", "poison", "3")
    assert "promises" in conformance.judge(row, {"g": {"x": "1"}}, {"g": {"x": "2"}}, {"poison"})
    assert "no outcome" in conformance.judge(row, {"g": {}}, {"g": {"x": "2"}}, {"poison"})
