"""The gate ledger: verdicts bound to what they judged, order of phases, what `run` calls PASS."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from pytest_npu import LedgerError, NoCheckpoint
from pytest_npu.ledger import store as ledger
from pytest_npu.report.model import build_run_report

from llms.verify.contract.models import ROOT, ModelFolder, read_folder, report_root
from npu_deploy import documents, run, status
from npu_deploy.documents import PhaseResult
from npu_deploy.errors import (
    BAD_CHECKPOINT,
    GATE_FAILED,
    NOTHING_RAN,
    OK,
    PRECONDITION,
    DeployError,
    ledger_errors,
)

PARTS = ledger.Identity("p" * 16, "w" * 16, "a" * 16, "t" * 16, "g" * 16, "n" * 16)


def entry(phase: int, verdict: str = "PASS", identity: ledger.Identity = PARTS) -> ledger.Entry:
    return ledger.Entry(
        "m",
        phase,
        verdict,
        identity.hash,
        asdict(identity),
        "twin (modelled)",
        "tiny",
        "2026-01-01T00:00:00Z",
        "r",
        1.0,
    )


def test_what_is_appended_is_read_back_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m" / "ledger.jsonl"
    ledger.append(path, [entry(0), entry(1, "FAIL")])
    ledger.append(path, [entry(1)])
    with path.open("a") as stream:
        stream.write('{"model": "m", "pha')
    found = ledger.read(path)
    assert [(e.phase, e.verdict) for e in found] == [(0, "PASS"), (1, "FAIL"), (1, "PASS")]
    assert ledger.last_by_phase(found)[1].verdict == "PASS"


def test_a_file_that_is_no_ledger_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"other": 1}\n{"other": 2}\n')
    with pytest.raises(LedgerError, match="line 1 is no ledger entry"):
        ledger.read(path)


@pytest.mark.parametrize(
    ("error", "code"), [(LedgerError("x"), PRECONDITION), (NoCheckpoint("x"), BAD_CHECKPOINT)]
)
def test_commands_end_with_the_exit_code_of_what_is_wrong(error: LedgerError, code: int) -> None:
    with pytest.raises(DeployError, match="x") as caught, ledger_errors():
        raise error
    assert caught.value.exit_code == code


@pytest.mark.parametrize("part", asdict(PARTS))
def test_a_change_of_any_part_ends_a_verdict(part: str) -> None:
    changed = replace(PARTS, **{part: "x" * 16})
    assert ledger.holds([entry(0)], 0, PARTS)
    assert not ledger.holds([entry(0)], 0, changed)
    assert changed.differences(entry(0).parts) == [part]
    assert not ledger.holds([entry(0), entry(0, "FAIL")], 0, PARTS)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFolder:
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "thing"
    (folder / "tests").mkdir(parents=True)
    (folder / "verify_adapter.py").write_text("MODEL_CHOICES = {'base': 'x/y'}\nDEFAULT_MODEL = 'base'\n")
    return read_folder(folder)


def test_a_phase_needs_the_phases_before_it_for_the_same_hash(model: ModelFolder) -> None:
    request = run.RunRequest(first=2)
    run._check_order(model, request, [entry(0), entry(1)], PARTS)
    with pytest.raises(DeployError, match="phase 1, which has not run") as caught:
        run._check_order(model, request, [entry(0)], PARTS)
    assert caught.value.exit_code == PRECONDITION
    with pytest.raises(DeployError, match="judged before a change of weights"):
        run._check_order(model, request, [entry(0), entry(1)], replace(PARTS, weights="other"))
    with pytest.raises(DeployError, match="phase 1, which is FAIL"):
        run._check_order(model, request, [entry(0), entry(1, "FAIL")], PARTS)
    run._check_order(model, replace(request, force=True), [], PARTS)


def test_out_of_order_is_seen() -> None:
    late = [entry(1), entry(0)]
    assert not status._in_order(late, late[0])
    right = [entry(0), entry(1)]
    assert status._in_order(right, right[1])
    other = [entry(0, identity=replace(PARTS, gates="old")), entry(1)]
    assert not status._in_order(other, other[1])


def result(phase: int, verdict: str) -> PhaseResult:
    return PhaseResult(phase, "x", verdict, {"passed": 1}, "s", "e", 60.0, 10.0)


def test_nothing_behind_the_first_non_pass_counts() -> None:
    found = run._stop_at_first([result(0, "PASS"), result(1, "FAIL"), result(2, "PASS")])
    assert [r.verdict for r in found] == ["PASS", "FAIL", "BLOCKED"]
    assert run._exit_code(found, 1) == GATE_FAILED
    assert run._exit_code([result(0, "PASS")], 0) == OK


def test_a_phase_without_a_test_is_never_pass() -> None:
    found = run._phase_result(3, None)
    assert found.verdict == run.NO_TESTS
    assert run._exit_code([result(2, "PASS"), found], 0) == NOTHING_RAN


def test_phases_are_those_that_tests_mark(model: ModelFolder) -> None:
    (model.tests / "test_a.py").write_text("pytestmark = pytest.mark.phase0\n")
    (model.tests / "test_b.py").write_text("@pytest.mark.phase6\ndef test(): pass\n")
    assert run.phases_with_tests(model) == {0, 6}


def test_device_time_is_taken_off_only_where_it_is_real() -> None:
    assert result(0, "PASS").remaining_s(measured=True) == 50.0
    assert result(0, "PASS").remaining_s(measured=False) == 60.0


def facts(model: ModelFolder, **changes: Any) -> documents.Facts:
    given: dict[str, Any] = {
        "model": model,
        "phases": [result(0, "PASS")],
        "known": {0: "PASS", 1: "FAIL"},
        "device": "twin (modelled)",
        "checkpoint": "some weights",
        "run_folder": None,
        "warnings": ["a warning"],
        "reasons": ["not on silicon"],
        "config": None,
        "report": None,
    }
    return documents.Facts(**{**given, **changes})


def test_documents_keep_what_people_wrote_and_say_what_happened(model: ModelFolder, tmp_path: Path) -> None:
    todo = model.folder / "TODO.md"
    todo.write_text(f"# mine\n\n{documents.BEGIN}\nold\n{documents.END}\n\nmy own line\n")
    documents.write_all(facts(model), model.folder)
    text = todo.read_text()
    assert "my own line" in text
    assert "old" not in text
    assert "- [x] phase 0 reference" in text
    assert "- [ ] phase 1 kernels: FAIL" in text
    assert "needs-human-review" in text
    assert "a warning" in text
    before = text
    documents.write_all(facts(model), model.folder)
    assert todo.read_text() == before
    timing = (documents.results_of(model) / "phase_timing.md").read_text()
    assert timing.count("| 0 x | s | e | 1.00 | 0.167 | 1.00 | twin (modelled) | PASS |") == 2


def test_results_go_below_reports_and_the_folder_keeps_its_list(model: ModelFolder, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "evaluation_report.md").write_text("what the plugin wrote\n")
    written = documents.write_all(facts(model, run_folder=run_folder), model.folder)
    results = tmp_path / "reports" / "thing"
    names = ["phase_timing.md", "progress.md", "evaluation_report.md", "handoff.md"]
    assert sorted(written) == sorted([model.folder / "TODO.md", *(results / name for name in names)])
    assert (results / "evaluation_report.md").read_text() == "what the plugin wrote\n"
    assert {path.name for path in model.folder.iterdir()} == {"tests", "verify_adapter.py", "TODO.md"}


def test_no_result_of_a_run_is_committed() -> None:
    kept = {path.name for path in ROOT.glob("*/*.md")}
    assert kept == {"README.md", "ARCHITECTURE.md", "LESSONS.md", "TODO.md"}
    assert not list(ROOT.glob("*/docs"))


def test_the_hand_off_of_a_stopped_run_names_the_phase(model: ModelFolder) -> None:
    stopped = facts(model, phases=[result(0, "PASS"), replace(result(1, "FAIL"), reason="too far")])
    documents.write_all(stopped, model.folder)
    page = (documents.results_of(model) / "handoff.md").read_text()
    assert "hand-off (stopped)" in page
    assert "Stopped at phase 1 x: FAIL. too far" in page
    assert "--from 1" in page


def test_the_list_of_a_committed_model_goes_to_its_results(model: ModelFolder) -> None:
    results = report_root(model.folder) / "thing"
    assert documents.home(model, None) == results
    assert documents.home(model, True) == model.folder
    (model.folder / "deployment.json").write_text(json.dumps({}))
    assert documents.home(model, None) == model.folder
    assert documents.home(model, False) == results


def test_a_phase_lasts_from_its_first_start_to_its_last_end() -> None:
    def event(kind: str, t: float, node: str, phase: int, **fields: Any) -> dict[str, Any]:
        return {"event": kind, "t": t, "nodeid": node, "phase": phase, **fields}

    call = {"when": "call", "outcome": "passed", "duration_s": 1.0, "device_s": 0.5}
    events = [
        event("test_start", 10.0, "a", 0),
        event("test_phase", 11.0, "a", 0, **call),
        event("test_finish", 12.0, "a", 0),
        event("test_start", 13.0, "b", 0),
        event("test_phase", 15.0, "b", 0, **call),
        event("test_start", 20.0, "c", 1),
        event("test_finish", 29.0, "c", 1),
        {"event": "session_finish", "t": 30.0, "exit_status": 0},
    ]
    phases = build_run_report("thing", events).phases
    assert [(p.started_at, p.ended_at, p.device_s) for p in phases] == [(10.0, 15.0, 1.0), (20.0, 29.0, 0.0)]
    found = run._phase_result(0, build_run_report("thing", events))
    assert (found.wall_s, found.device_s) == (5.0, 1.0)
