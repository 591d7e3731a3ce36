"""`reports/index.html`: all models, their latest verdict and the trend over runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pytest_npu.core.constants import FAULT_PLANTED, NO_MODEL
from pytest_npu.core.events import atomic_write, read_events
from pytest_npu.core.exceptions import EventLogError
from pytest_npu.report.runlogs import EVENTS_FILE

from .model import build_run_report, count_text
from .plots import sparkline
from .render import render_index
from .results import RESULTS_FILE, results_of
from .values import number
from .view import VERDICT_CLASS, time_text

#: Rows per model in the list, and bars in its history.
MAX_ROWS = 25
MAX_HISTORY = 40


@dataclass(frozen=True)
class Run:
    """One run as the index shows it. Times in ms; `duration` in s."""

    run: str
    href: str
    verdict: str
    css: str
    counts: str
    device: str
    checkpoint: str
    when: str
    started_at: float
    duration: float
    ttft: float | None
    tpot: float | None


@dataclass(frozen=True)
class ModelRuns:
    """All runs of one model, newest first; `history` is oldest first."""

    name: str
    runs: list[Run]
    older: int
    history: list[Run]
    trend: str
    trend_text: str

    @property
    def latest(self) -> Run:
        """The newest run, of those without a planted fault if there are any."""
        return next((run for run in self.runs if FAULT_PLANTED not in run.device), self.runs[0])

    @property
    def ttft(self) -> float | None:
        """TTFT of the newest run that recorded one on the latest run's device."""
        return next((run.ttft for run in self._comparable if run.ttft is not None), None)

    @property
    def tpot(self) -> float | None:
        """TPOT of the newest run that recorded one on the latest run's device."""
        return next((run.tpot for run in self._comparable if run.tpot is not None), None)

    @property
    def _comparable(self) -> list[Run]:
        return [run for run in self.runs if run.device == self.latest.device]


def write_index(report_dir: Path) -> Path:
    """Write `index.html` for all runs below `report_dir`. Raises OSError."""
    path = report_dir / "index.html"
    atomic_write(path, render_index(collect_models(report_dir)))
    return path


def collect_models(report_dir: Path) -> list[ModelRuns]:
    """Read the results of all runs; a run that left only its event log (killed) is read from that."""
    models = []
    for folder in sorted(path for path in report_dir.iterdir() if path.is_dir()):
        paths = sorted((p for p in folder.iterdir() if p.is_dir()), key=_age, reverse=True)
        newest = paths[:MAX_HISTORY]  # reading all results of a nightly job of years would take minutes
        runs = [run for path in newest if (run := _read_run(path)) is not None]
        if runs:
            runs.sort(key=lambda run: (run.started_at, run.run), reverse=True)
            models.append(_model(folder.name, runs, unread=len(paths) - len(newest)))
    return sorted(models, key=lambda model: model.name == NO_MODEL)  # tests of no model come last


def _age(folder: Path) -> tuple[float, str]:
    try:
        return folder.stat().st_mtime, folder.name
    except OSError:
        return 0.0, folder.name


def _model(name: str, runs: list[Run], unread: int) -> ModelRuns:
    timed = [run for run in runs if run.tpot is not None]
    same = [
        run
        for run in reversed(timed)
        if (run.device, run.checkpoint) == (timed[0].device, timed[0].checkpoint)
    ]
    values = [run.tpot for run in same if run.tpot is not None][-MAX_HISTORY:]
    text = ""
    if len(values) > 1:
        first, last = f"{values[0]:.2f}", f"{values[-1]:.2f}"
        text = f"{last} ms" if first == last else f"{first} to {last} ms"
        text += f", {timed[0].device}"
    history = list(reversed(runs[:MAX_HISTORY]))
    return ModelRuns(
        name, runs[:MAX_ROWS], max(0, len(runs) - MAX_ROWS) + unread, history, sparkline(values), text
    )


def _read_run(folder: Path) -> Run | None:
    results = _read_results(folder)
    if results is None:
        return None
    try:
        timing = results.get("timing") or {}
        verdict = str(results["verdict"])
        checkpoint = (results["deployment"] or {}).get("checkpoint") or {}
        page = "report.html" if (folder / "report.html").is_file() else EVENTS_FILE
        return Run(
            run=folder.name,
            href=quote(f"{folder.parent.name}/{folder.name}/{page}"),
            verdict=verdict,
            css=VERDICT_CLASS.get(verdict, "warn"),
            counts=count_text(results["counts"]),
            device=str((results["device"] or {}).get("label") or ""),
            checkpoint=str(checkpoint.get("label") or ""),
            when=time_text(float(results["started_at"])),
            started_at=float(results["started_at"]),
            duration=float(results["duration_s"]),
            ttft=number(timing.get("ttft_ms")),
            tpot=number(timing.get("tpot_ms")),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _read_results(folder: Path) -> dict[str, Any] | None:
    """Results of a run folder; None for a folder that is none of ours or cannot be read."""
    try:
        results: dict[str, Any] = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        return results
    except (OSError, ValueError):
        pass
    try:
        events = list(read_events(folder / EVENTS_FILE))
    except EventLogError:
        return None
    return results_of(build_run_report(folder.parent.name, events), folder.name) if events else None
