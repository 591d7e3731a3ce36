"""Every rigged adapter ends in FAIL with its reason; the same deployment without a trick passes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llms.verify.gates import phase7 as audit
from llms.verify.ladder.climbing import RUNGS

RIGGED = Path(__file__).resolve().parents[1] / "data" / "rigged"


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[audit.AuditOutcome, Path]]:
    """Audit a rigged folder once, without the ladder."""
    done: dict[str, tuple[audit.AuditOutcome, Path]] = {}

    def find(name: str) -> tuple[audit.AuditOutcome, Path]:
        if name not in done:
            out = tmp_path_factory.mktemp(name)
            done[name] = (audit.in_fresh_process(audit.AuditRequest(RIGGED / name, ladder=False), out), out)
        return done[name]

    return find


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "question", "reason"),
    [
        ("replay", "production", "run_npu_prefill was called 0 times"),
        ("cached", "production", "the same prompt again: run_npu_prefill was called 0 times"),
        ("forked", "production", "run_npu_prefill was called 0 times"),
        ("fp32_reference", "reference", "its live parameters are float32, not bfloat16"),
        ("weakened_k", "judge", "it passes the sixth best token"),
        ("weakened_k", "integrity", "llms.verify.gates.phase6.gate:judge (now lenient of verify_adapter.py)"),
        ("tokens_only", "production", "no program was started on the device"),
        ("pytest_path", "production", "run_npu_prefill was called 0 times"),
        ("discards", "production", "step 0 is not what the production function returned"),
        ("other_weights", "reference", "1 tensors differ from the checkpoint's"),
        ("patched_clock", "integrity", "TwinClock.now (now slow_now of verify_adapter.py)"),
        ("loose_limits", "integrity", "Limit.exceeded (now never of verify_adapter.py)"),
        ("loose_kernels", "integrity", "llms.verify.reference.kernels.tolerances:_TOLERANCES"),
        (
            "loose_steps",
            "integrity",
            "gates.optimisation:judge_step (now lenient of verify_adapter.py)",
        ),
        ("record", "production", "first run: run_npu_prefill was called 0 times"),
        ("f32_arithmetic", "reference", "of its logits are those of a bf16 model"),
        ("patched_production", "integrity", "run_npu_prefill is not the one of the source"),
    ],
)
def test_rigged_adapter_is_found_out(
    name: str, question: str, reason: str, audited: Callable[[str], tuple[audit.AuditOutcome, Path]]
) -> None:
    outcome, folder = audited(name)
    assert not outcome.ok
    assert outcome.payload["verdict"] == "FAIL", outcome.message
    found = {f["key"]: f for f in outcome.payload["findings"]}
    assert found[question]["status"] == "FAIL", outcome.payload
    assert reason in found[question]["evidence"], found[question]
    assert reason in outcome.message
    assert "FAIL" in (folder / "evaluation_report.md").read_text().splitlines()[0]


@pytest.mark.slow
def test_same_deployment_without_a_trick(tmp_path: Path) -> None:
    outcome = audit.in_fresh_process(audit.AuditRequest(RIGGED / "honest"), tmp_path)
    assert outcome.ok, outcome.message
    assert outcome.payload["verdict"] == "PASS-with-warnings"
    assert {f["key"] for f in outcome.payload["findings"] if f["status"] == "WARN"} == {"checkpoint"}
    assert {rung["status"] for rung in outcome.payload["ladder"]} == {"passed"}
    text = (tmp_path / "evaluation_report.md").read_text()
    for part in (
        "# honest: PASS",
        "## Independent audit: PASS-with-warnings",
        "| token-set gate | 1 of 1 prompts pass;",
        f"| ladder | {len(RUNGS)} of {len(RUNGS)} rungs pass; nearest to its limit: ",
        "| planted faults | 3 of 3 make the gates fail |",
        "## Questions and answers",
        "## What this does not show",
        "## Reproduce",
    ):
        assert part in text
    found = text[text.index("## Independent audit") : text.index("## Environment")]
    assert len(found.split()) < 900  # to be read in two minutes
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "http" not in page
    assert '<section id="audit">' in page
    assert json.loads((tmp_path / "results.json").read_text())["verdict"] == "PASS"
    assert json.loads((tmp_path / "audit.json").read_text()) == outcome.payload


@pytest.mark.slow
def test_planted_mock_fails(tmp_path: Path) -> None:
    outcome = audit.in_fresh_process(
        audit.AuditRequest(Path("qwen2"), ladder=False, fault="gate_on_a_mock"), tmp_path
    )
    assert not outcome.ok
    assert "no program was started on the device" in outcome.message


def test_unknown_model_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llms.audit", "no_such_model", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown model 'no_such_model'")
    assert list(tmp_path.iterdir()) == []
