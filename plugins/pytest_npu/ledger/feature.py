"""Verdicts of this run for the gate ledgers of its models (`npu-deploy status`).

A phase counts as a whole or not at all: a PASS of some of its tests is no verdict. A FAIL is one, however
many tests ran. The outcome of a test never depends on a ledger.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_npu.core.constants import DEFAULT_N_TOKENS, DEFAULT_PROMPTS, NO_MODEL
from pytest_npu.core.events import Event, read_events
from pytest_npu.core.options import NpuOptions
from pytest_npu.core.phases import phase_of, phases_in
from pytest_npu.report.model import RunReport, build_run_report
from pytest_npu.report.runlogs import EVENTS_FILE

if TYPE_CHECKING:
    from pytest_npu.core.state import NpuState, TestInfo

_SLOW = "slow"


class LedgerHooks:
    """Knows which phases are whole; owns the phases that somebody took a test out of."""

    def __init__(self, state: NpuState) -> None:
        self._state = state
        self._left_out: set[tuple[Path, int]] = set()

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        """A phase that lost a test gets no PASS; long tests are extras of a phase; `pytest_deselected`."""
        for item in items:
            phase, folder = phase_of(item), self._state.folders.of(item.path)
            if folder is not None and phase is not None and item.get_closest_marker(_SLOW) is None:
                self._left_out.add((folder, phase))

    def whole_phases(self, folder: Path | None, tests: Iterable[TestInfo]) -> list[int]:
        """Phases of a model of which every test file was collected and no test was left out."""
        if folder is None:
            return []
        config = self._state.config
        here = Path(config.invocation_params.dir)
        cut = {(here / arg.split("::", 1)[0]).resolve() for arg in config.args if "::" in arg}
        files: dict[int, set[Path]] = {}
        for test in tests:
            if test.phase is not None:
                path = (config.rootpath / test.nodeid.split("::", 1)[0]).resolve()
                files.setdefault(test.phase, set()).add(path)
        marked = {path.resolve(): phases_in(path) for path in (folder / "tests").glob("test_*.py")}
        whole = []
        for phase, collected in sorted(files.items()):
            wanted = {path for path, phases in marked.items() if phase in phases}
            complete = bool(wanted) and wanted <= collected and not wanted & cut
            if complete and (folder, phase) not in self._left_out:
                whole.append(phase)
        return whole


def keep_verdicts(config: pytest.Config, folders: Mapping[str, Path]) -> None:
    """Append what this run found to the ledgers; what stands in the way is said, never raised."""
    options = NpuOptions.from_config(config)
    weaker = options.n_tokens < DEFAULT_N_TOKENS or (
        options.prompts is not None and options.prompts < DEFAULT_PROMPTS
    )
    if config.getoption("npu_no_ledger") or options.fault is not None or options.adopt or weaker:
        return
    for model, run_folder in folders.items():
        if model == NO_MODEL:
            continue
        try:
            _keep(config, options, model, run_folder)
        except Exception as error:
            print(f"npu: {model}: no verdict in the gate ledger: {error}", file=sys.stderr)


def _keep(config: pytest.Config, options: NpuOptions, model: str, run_folder: Path) -> None:
    events = list(read_events(run_folder / EVENTS_FILE))
    report = build_run_report(model, events)
    verdicts = verdicts_of(report, events)
    folder = next((event["folder"] for event in events if event.get("folder")), None)
    if not verdicts or folder is None:
        return
    from pytest_npu.ledger import verdicts as deployed

    named = config.getoption("npu_report_dir")
    book = options.report_dir / model / "ledger.jsonl" if named else None
    deployed.keep(
        Path(folder),
        verdicts,
        report,
        run_folder.name,
        book=book,
        checkpoint=options.checkpoint,
        choice=options.model,
    )


def verdicts_of(report: RunReport, events: Iterable[Event]) -> dict[int, str]:
    """Phase -> PASS or FAIL, of the phases that may have a verdict."""
    whole = {phase for event in events for phase in event.get("whole", ())}
    verdicts: dict[int, str] = {}
    for summary in report.phases:
        if summary.phase is None or set(summary.counts) == {"blocked"}:
            continue
        over = report.finished and not report.interrupts
        if summary.verdict == "FAIL" or (summary.verdict == "PASS" and over and summary.phase in whole):
            verdicts[summary.phase] = summary.verdict
    return verdicts
