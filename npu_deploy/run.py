"""`npu-deploy run`: the phase gates of a model in order, as one pytest process.

The plugin in that process writes the reports and keeps the verdicts in the ledger; what is here decides what
runs and reads what came of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_npu.ledger import store as ledger

from llms.verify.contract.models import ROOT, ModelFolder, report_root
from npu_deploy import documents, folders, review
from npu_deploy.answer import Answer
from npu_deploy.documents import PhaseResult
from npu_deploy.errors import (
    GATE_FAILED,
    INTERRUPTED,
    NO_NPU,
    NOTHING_RAN,
    OK,
    PRECONDITION,
    USAGE,
    DeployError,
    ledger_errors,
)

if TYPE_CHECKING:
    from pytest_npu.report.model import RunReport

    from llms.verify.contract.deployment import Deployment

NO_TESTS = "NO TESTS"
BLOCKED = "BLOCKED"
# Exit codes of pytest: interrupted, wrong usage (no usable NPU with --npu).
_PYTEST_INTERRUPTED = 2
_PYTEST_USAGE = 4


@dataclass(frozen=True)
class RunRequest:
    """What the user asked for. `last` None: the last phase that has tests; `prompts`: a number or `all`."""

    first: int = 0
    last: int | None = None
    npu: bool = False
    checkpoint: Path | None = None
    choice: str | None = None
    prompts: str = "2"
    force: bool = False
    update_docs: bool | None = None
    quiet: bool = False


def run_all(request: RunRequest) -> Answer:
    """Run every model, one after the other; the exit code is the first that is not 0."""
    outcomes = []
    for model in folders.all_models():
        try:
            outcomes.append(run_model(str(model.folder), request))
        except DeployError as error:
            row = {"model": model.name, "verdict": "FAIL", "error": str(error), "exit_code": error.exit_code}
            outcomes.append(Answer(row, (f"{model.name}: error: {error}",), error.exit_code))
    code = next((outcome.exit_code for outcome in outcomes if outcome.exit_code != OK), OK)
    lines = [line for outcome in outcomes for line in (*outcome.lines, "")]
    return Answer({"models": [outcome.data for outcome in outcomes]}, tuple(lines), code)


@ledger_errors()
def run_model(name: str | None, request: RunRequest) -> Answer:
    """Run one model. Raises DeployError for what keeps the run from starting."""
    if name is None:
        raise DeployError("name a model, or say --all", USAGE)
    model = folders.find(name)
    present = phases_with_tests(model)
    last = request.last if request.last is not None else max(present, default=6)
    if request.first > last:
        raise DeployError(f"--from {request.first} is after --to {last}", USAGE)
    if request.checkpoint is not None and not request.checkpoint.expanduser().exists():
        raise DeployError(f"--checkpoint {request.checkpoint} does not exist", USAGE)
    deployment = ledger.open_deployment(model, request.checkpoint, request.choice)
    identity = ledger.identity_of(deployment)
    _check_order(model, request, ledger.read(ledger.path_of(model)), identity)

    wanted = list(range(request.first, last + 1))
    runnable = [n for n in wanted if all(m in present for m in wanted if m <= n)]
    begin = time.time()
    finished = _pytest(model, request, runnable)
    report, folder = finished.report, finished.folder
    results = _stop_at_first([_phase_result(number, report) for number in wanted])
    device = report.device_label if report is not None else "no device used"
    label = deployment.checkpoint.label
    facts = _facts(model, deployment, results, identity, device, report, folder)
    facts = replace(facts, warnings=[*facts.warnings, *_unkept(model, finished, results)])
    written = documents.write_all(facts, documents.home(model, request.update_docs))
    exit_code = _exit_code(results, finished.exit_code)
    result = {
        "model": model.name,
        "verdict": "PASS" if exit_code == OK else next(r.verdict for r in results if r.verdict != "PASS"),
        "exit_code": exit_code,
        "phases": [_as_dict(r) for r in results],
        "hash": identity.hash,
        "device": device,
        "checkpoint": label,
        "report": str(folder) if folder is not None else None,
        "documents": [str(path) for path in written],
        "needs_human_review": bool(facts.reasons),
        "review_reasons": list(facts.reasons),
        "warnings": list(facts.warnings),
        "wall_s": round(time.time() - begin, 1),
    }
    return Answer(result, tuple(_summary(facts, results, result)), exit_code)


def phases_with_tests(model: ModelFolder) -> set[int]:
    """Phases that a test file of the model marks. Reads source only."""
    from pytest_npu.core.phases import phases_in

    return {phase for path in model.tests.glob("test_*.py") for phase in phases_in(path)}


def _check_order(
    model: ModelFolder, request: RunRequest, entries: list[ledger.Entry], identity: ledger.Identity
) -> None:
    if request.first == 0 or request.force:
        return
    missing = [n for n in range(request.first) if not ledger.holds(entries, n, identity)]
    if missing:
        last = ledger.last_by_phase(entries).get(missing[0])
        why = "has not run" if last is None else f"is {last.verdict}"
        if last is not None and (changed := identity.differences(last.parts)):
            why = f"was judged before a change of {', '.join(changed)}"
        raise DeployError(
            f"{model.name}: phase {request.first} comes after a PASS of phase {missing[0]}, which {why}; "
            f"start with --from {missing[0]}, or say --force",
            PRECONDITION,
        )


@dataclass(frozen=True)
class PytestRun:
    """A pytest process that is over: exit code, report and the folder that holds it."""

    exit_code: int
    report: RunReport | None = None
    folder: Path | None = None


def _pytest(model: ModelFolder, request: RunRequest, phases: list[int]) -> PytestRun:
    """Run the phases in one process."""
    from pytest_npu.core.events import read_events
    from pytest_npu.report.model import build_run_report
    from pytest_npu.report.runlogs import EVENTS_FILE

    if not phases:
        return PytestRun(OK)
    root = report_root(model.folder)
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-deploy-{os.getpid()}"
    parent = ROOT.parent if model.folder.parent == ROOT else model.folder.parent
    command = [sys.executable, "-m", "pytest", str(model.tests), "-m"]
    command += [" or ".join(f"phase{number}" for number in phases)]
    command += ["--import-mode=importlib", f"--rootdir={parent}"]
    command += ["--npu-report-dir", str(root), "--npu-run-id", run_id, "--npu-prompts", request.prompts]
    command += ["--npu"] if request.npu else []
    command += ["--checkpoint", str(request.checkpoint.expanduser().absolute())] if request.checkpoint else []
    command += ["--npu-model", request.choice] if request.choice else []
    # Spinning OpenMP threads starve each other when cores are shared.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    stdout = sys.stderr if request.quiet else None
    code = subprocess.call(command, cwd=parent, env=environment, stdout=stdout)
    folder = root / model.name / run_id
    if not (folder / EVENTS_FILE).is_file():
        return PytestRun(code)
    return PytestRun(code, build_run_report(model.name, read_events(folder / EVENTS_FILE)), folder)


def _phase_result(number: int, report: RunReport | None) -> PhaseResult:
    from pytest_npu.core.constants import PHASES

    summary = None if report is None else next((p for p in report.phases if p.phase == number), None)
    if report is None or summary is None:
        return PhaseResult(number, PHASES[number], NO_TESTS, reason="no test of this phase ran")
    verdict = summary.verdict
    if verdict == "PASS" and (not report.finished or report.interrupts):
        verdict = "INCOMPLETE"
    tests = [test for test in report.tests.values() if test.phase == number]
    bad = next((t for t in tests if t.outcome not in ("passed", "blocked", "skipped")), None)
    begun = bool(summary.started_at)
    return PhaseResult(
        number,
        PHASES[number],
        verdict,
        summary.counts,
        _clock(summary.started_at) if begun else "",
        _clock(summary.ended_at) if begun else "",
        summary.ended_at - summary.started_at if begun else summary.duration_s,
        summary.device_s,
        f"{bad.name}: {bad.reason}" if bad is not None else "",
    )


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _stop_at_first(results: list[PhaseResult]) -> list[PhaseResult]:
    """Nothing behind the first phase that is not PASS counts, whatever ran."""
    for place, result in enumerate(results):
        if result.verdict != "PASS":
            reason = f"{result.label} is {result.verdict}"
            later = [replace(r, verdict=BLOCKED, reason=reason, counts={}) for r in results[place + 1 :]]
            return [*results[: place + 1], *later]
    return results


def _facts(
    model: ModelFolder,
    deployment: Deployment,
    results: list[PhaseResult],
    identity: ledger.Identity,
    device: str,
    report: RunReport | None,
    folder: Path | None,
) -> documents.Facts:
    from llms.llama_kernel_builder.model_config import ModelConfig

    last = ledger.last_by_phase(ledger.read(ledger.path_of(model)))
    known = {n: e.verdict if e.hash == identity.hash else f"{e.verdict}, stale" for n, e in last.items()}
    config = deployment.config()
    return documents.Facts(
        model,
        results,
        known,
        device,
        deployment.checkpoint.label,
        folder,
        review.warnings(deployment, report) if report is not None else [],
        review.reasons(deployment, report) if report is not None else [],
        config if isinstance(config, ModelConfig) else None,
        report,
    )


def _unkept(model: ModelFolder, finished: PytestRun, results: list[PhaseResult]) -> list[str]:
    """A warning when verdicts of the run are not in the ledger; the plugin says more on stderr."""
    run_id = finished.folder.name if finished.folder is not None else ""
    kept = {entry.phase for entry in ledger.read(ledger.path_of(model)) if entry.run == run_id}
    unkept = ", ".join(r.label for r in results if r.verdict in ("PASS", "FAIL") and r.phase not in kept)
    if not unkept:
        return []
    why = "runs of less than 2 prompts leave none, nor do runs during which the code changed"
    return [f"the gate ledger got no verdict for {unkept}: {why}"]


def _exit_code(results: list[PhaseResult], code: int) -> int:
    if all(result.verdict == "PASS" for result in results):
        return OK
    if code == _PYTEST_USAGE:
        return NO_NPU
    if code == _PYTEST_INTERRUPTED:
        return INTERRUPTED
    first = next(result for result in results if result.verdict != "PASS")
    return NOTHING_RAN if first.verdict in (NO_TESTS, "EMPTY", "INCOMPLETE") else GATE_FAILED


def _as_dict(result: PhaseResult) -> dict[str, Any]:
    return {
        key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(result).items()
    }


def _summary(facts: documents.Facts, results: list[PhaseResult], result: dict[str, Any]) -> list[str]:
    lines = [f"{facts.model.name}: {result['verdict']}  ({facts.device}; {facts.checkpoint})"]
    for r in results:
        lines.append(f"  {r.label:22} {r.verdict:11} {r.wall_s:6.1f} s  {r.reason}".rstrip())
    if facts.reasons:
        lines += [f"  {documents.REVIEW}:", *(f"    - {text}" for text in facts.reasons)]
    lines += [f"  warning: {text}" for text in facts.warnings]
    if facts.run_folder is not None:
        lines.append(f"  report: {facts.run_folder / 'report.html'}")
    lines.append(f"  hand-off: {documents.results_of(facts.model) / 'handoff.md'}")
    return lines
