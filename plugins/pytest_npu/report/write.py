"""Write all files of a run folder from its events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pytest_npu.core.events import atomic_write, read_events
from pytest_npu.report.runlogs import EVENTS_FILE, RunLogs, claim_run_folder, fallback_dir

from .index import write_index
from .junit import render_junit
from .model import RunReport, build_run_report
from .render import render_markdown, render_report
from .results import RESULTS_FILE, results_of


@dataclass(frozen=True)
class Written:
    """What became of the report of one model. `error` is None when every file was written."""

    folder: Path
    report: RunReport
    error: str | None = None
    log_error: str | None = None
    fallback_reason: str | None = None


def write_reports(logs: RunLogs) -> list[Written]:
    """Write the reports of all models of a run and the index. A full disk is reported, never raised."""
    written = []
    errors = logs.errors()
    for model, folder in logs.folders.items():
        report = build_run_report(model, logs.events(model))
        log_error = str(errors[model].strerror) if model in errors else None
        error, reason = _write_safely(folder, report), logs.fallback_reason
        if error is not None and reason is None:
            elsewhere = _write_elsewhere(folder, report)
            if elsewhere is not None:
                folder, error, reason = elsewhere, None, f"{folder} cannot be written ({error})"
        written.append(Written(folder, report, error, log_error, reason))
    return written


def _write_safely(folder: Path, report: RunReport) -> str | None:
    try:
        write_run_folder(folder, report)
        write_index(folder.parent.parent)
    except OSError as error:
        return error.strerror or str(error)
    except Exception as error:  # a record of an unexpected shape must not take the run's end down with it
        return f"{type(error).__name__} while rendering: {error}"
    return None


def _write_elsewhere(folder: Path, report: RunReport) -> Path | None:
    """The same below the temporary folder, for a disk that became full; None when that fails, too."""
    try:
        other = claim_run_folder(fallback_dir(), folder.parent.name, folder.name)
    except OSError:
        return None
    return other if _write_safely(other, report) is None else None


def write_run_folder(folder: Path, report: RunReport) -> None:
    """Write every report file of one run. Raises OSError."""
    run = folder.name
    atomic_write(folder / RESULTS_FILE, json.dumps(results_of(report, run), indent=1) + "\n")
    atomic_write(folder / "junit.xml", render_junit(report))
    atomic_write(folder / "evaluation_report.md", render_markdown(report, run))
    atomic_write(folder / "report.html", render_report(report, run))


def render_folder(folder: Path) -> RunReport:
    """Render a run folder again from its event log, for example after a kill.

    Raises EventLogError when there is no readable log, OSError when the files cannot be written.
    """
    report = build_run_report(folder.parent.name, read_events(folder / EVENTS_FILE))
    write_run_folder(folder, report)
    return report
