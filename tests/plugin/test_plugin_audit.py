"""The record of an audit in the reports of a run, and the report of an audit that ran outside of pytest."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pytest_npu.report import audit_view
from pytest_npu.report.audit import write_audit
from pytest_npu.report.model import build_run_report
from pytest_npu.report.render import render_markdown, render_report
from pytest_npu.report.write import render_folder

COMMAND = "python -m llms.audit llms/thing"


@pytest.fixture
def payload() -> dict[str, Any]:
    nearest = {"statistic": "teacher_forced.kl", "value": 0.02, "limit": 0.04, "share": 0.5, "where": "p 1"}
    prompt = {"text": "Say <b>hi</b> | now", "n_steps": 32, "divergence_step": 7, "status": "OK"}
    prompt |= {"npu_token_text": " a", "hf_token_text": " the"}
    return {
        "model": "thing",
        "verdict": "PASS-with-warnings",
        "device": "twin (modelled)",
        "checkpoint": {"label": "tiny", "kind": "tiny", "content_hash": "0123456789abcdef"},
        "environment": {"python": "3.12.1", "process": "17", "torch": "2.13.0"},
        "date": "2026-01-02 03:04",
        "seconds": 21.4,
        "command": COMMAND,
        "findings": [
            {"key": "judge", "question": "Can it fail?", "status": "PASS", "evidence": "6 traces"},
            {"key": "checkpoint", "question": "Is it real?", "status": "WARN", "evidence": "a stand-in"},
        ],
        "figures": {
            **{"ttft_ms": 12.51, "predicted_ttft_ms": 12.35, "tpot_ms": 5.0, "predicted_tpot_ms": 5.24},
            **{"prompt_rows": 128, "programs_started": 135, "faults_planted": 3, "faults_seen": 3},
        },
        "gate": {"prompts": [prompt]},
        "ladder": [
            {"name": "teacher_forced", "status": "passed", "reason": "", "nearest": nearest},
            {"name": "limits", "status": "not offered", "reason": "no prompt_limits", "nearest": None},
        ],
    }


def everything(text: str) -> None:
    """What the audit found is in a report, whatever its form."""
    for part in (
        "PASS-with-warnings",
        "the warnings say what this audit could not or did not show",
        "tiny, content 0123456789ab",
        "1 of 1 prompts pass; first divergence at step 7",
        "1 of 1 rungs pass; nearest to its limit: teacher_forced.kl at 50% of it",
        "3 of 3 make the gates fail",
        "135",
        "12.5 ms for 128 rows (predicted 12.3 ms)",
        "5.00 ms, 200.0 tokens/s (predicted 5.24 ms)",
        "2026-01-02 03:04, 21 s, in a process of its own, without caches",
        "Can it fail?",
        "6 traces",
        "a stand-in",
        "no prompt_limits",
        "What this does not show",
        "numbers are those of its arithmetic",
        "--prompts 8",
        "--fault norm_plus_one  # must end in FAIL",
        "python 3.12.1, process 17, torch 2.13.0",
    ):
        assert part in text, part


def test_a_report_of_its_own(payload: dict[str, Any], tmp_path: Path) -> None:
    folder = write_audit(payload, time.time() - 21.4, tmp_path / "thing" / "audit")
    text = (folder / "evaluation_report.md").read_text()
    assert text.startswith("# thing: PASS\n")
    everything(text)
    assert f"```\n{COMMAND}\n```" in text
    page = (folder / "report.html").read_text()
    everything(page)
    assert "Say &lt;b&gt;hi" in page
    assert '<span class="badge warn-b">WARN</span>' in page
    assert json.loads((folder / "audit.json").read_text()) == payload
    results = json.loads((folder / "results.json").read_text())
    assert (results["model"], results["verdict"], results["exit_status"]) == ("thing", "PASS", 0)
    assert results["phases"][0]["phase"] == 7
    before = (folder / "evaluation_report.md").read_text()
    render_folder(folder)
    assert (folder / "evaluation_report.md").read_text() == before


def test_a_failed_audit_says_so_first(payload: dict[str, Any], tmp_path: Path) -> None:
    payload["findings"][0]["status"] = payload["verdict"] = "FAIL"
    payload["findings"][0]["evidence"] = "it passes the sixth best token"
    folder = write_audit(payload, time.time(), tmp_path / "out")
    text = (folder / "evaluation_report.md").read_text()
    assert text.startswith("# thing: FAIL\n\nFirst problem:")
    assert "it passes the sixth best token" in text.split("## Phases")[0]
    assert "a PASS of this model's gates is not to be trusted" in text
    assert text.index("| FAIL | Can it fail?") < text.index("| WARN | Is it real?")


def test_a_second_audit_replaces_the_first_in_a_folder(payload: dict[str, Any], tmp_path: Path) -> None:
    write_audit(payload, time.time(), tmp_path)
    write_audit({**payload, "date": "another day"}, time.time(), tmp_path)
    text = (tmp_path / "evaluation_report.md").read_text()
    assert "another day" in text
    assert "2026-01-02" not in text.replace(time.strftime("%Y-%m-%d"), "")


def test_without_a_folder_it_is_a_run_of_the_model(
    payload: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_audit(payload, time.time())
    assert folder.parent == Path("reports") / "thing"
    assert folder.name.endswith("-audit")
    assert f"thing/{folder.name}/report.html" in Path("reports/index.html").read_text()


def events(payload: Any) -> list[dict[str, Any]]:
    nodeid = "llms/thing/tests/test_phase7_audit.py::test_independent_audit"
    return [
        {"event": "session_start", "t": 1.0, "argv": ["-m", "phase7"]},
        {"event": "record", "t": 2.0, "nodeid": nodeid, "kind": "audit", "payload": payload},
    ]


def test_a_pytest_run_shows_what_was_recorded(payload: dict[str, Any]) -> None:
    report = build_run_report("thing", events(payload))
    everything(render_markdown(report, "run"))
    everything(render_report(report, "run"))
    assert "pytest -m phase7" in render_markdown(report, "run")


@pytest.mark.parametrize(
    "name", ["findings", "figures", "gate", "ladder", "checkpoint", "environment", "command"]
)
def test_a_part_that_is_missing_costs_its_lines(payload: dict[str, Any], name: str) -> None:
    del payload[name]
    report = build_run_report("thing", events(payload))
    assert len(audit_view.audits(report)) == 1
    assert "## Independent audit: PASS-with-warnings" in render_markdown(report, "run")
    assert '<section id="audit">' in render_report(report, "run")


def test_a_record_of_another_shape_is_shown_as_it_is(payload: dict[str, Any]) -> None:
    report = build_run_report("thing", events({**payload, "findings": "none"}))
    assert audit_view.audits(report) == []
    assert "audit, unexpected shape" in render_report(report, "run")
