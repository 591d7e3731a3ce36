"""Every rigged adapter ends in FAIL with its reason; the same deployment without a trick passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llms import audit

RIGGED = Path(__file__).resolve().parents[1] / "data" / "rigged"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "question", "reason"),
    [
        ("replay", "production", "run_npu_prefill was called 0 times"),
        ("cached", "production", "the same prompt again: run_npu_prefill was called 0 times"),
        ("forked", "production", "run_npu_prefill was called 0 times"),
        ("fp32_reference", "reference", "its live parameters are float32, not bfloat16"),
        ("weakened_k", "judge", "it passes the sixth best token"),
    ],
)
def test_rigged_adapter_is_found_out(name: str, question: str, reason: str, tmp_path: Path) -> None:
    outcome = audit.in_fresh_process(RIGGED / name, out=tmp_path, ladder=False)
    assert not outcome.ok
    assert outcome.payload["verdict"] == "FAIL", outcome.message
    found = {f["key"]: f for f in outcome.payload["findings"]}
    assert found[question]["status"] == "FAIL", outcome.payload
    assert reason in found[question]["evidence"], found[question]
    assert reason in outcome.message
    assert "FAIL" in (tmp_path / "evaluation_report.md").read_text().splitlines()[0]


@pytest.mark.slow
def test_same_deployment_without_a_trick(tmp_path: Path) -> None:
    outcome = audit.in_fresh_process(RIGGED / "honest", out=tmp_path)
    assert outcome.ok, outcome.message
    assert outcome.payload["verdict"] == "PASS-with-warnings"
    assert {f["key"] for f in outcome.payload["findings"] if f["status"] == "WARN"} == {"checkpoint"}
    assert {rung["status"] for rung in outcome.payload["ladder"]} == {"passed"}
    text = (tmp_path / "evaluation_report.md").read_text()
    for part in ("# Evaluation of honest: PASS-with-warnings", "## Findings", "## Measured", "## Reproduce"):
        assert part in text
    assert len(text.split()) < 900
    page = (tmp_path / "evaluation_report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "http" not in page
    assert json.loads((tmp_path / "audit.json").read_text()) == outcome.payload


@pytest.mark.slow
def test_planted_mock_fails(tmp_path: Path) -> None:
    outcome = audit.in_fresh_process(Path("qwen2"), out=tmp_path, ladder=False, fault="gate_on_a_mock")
    assert not outcome.ok
    assert "no program was started on the device" in outcome.message


def test_unknown_model_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llms.audit", "no_such_model", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown model 'no_such_model'")
    assert list(tmp_path.iterdir()) == []
