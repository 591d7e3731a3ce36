"""Write all files of a run folder from its events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..events import atomic_write
from ..runlogs import RunLogs
from .model import RunReport, build_run_report
from .results import results_of

RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class Written:
    """What became of the report of one model. `error` is None when every file was written."""

    folder: Path
    report: RunReport
    error: str | None = None
    log_error: str | None = None
    fallback_reason: str | None = None


def write_reports(logs: RunLogs) -> list[Written]:
    """Write the reports of all models of a run. A full disk is reported, never raised."""
    written = []
    errors = logs.errors()
    for model, folder in logs.folders.items():
        report = build_run_report(model, logs.events(model))
        log_error = str(errors[model].strerror) if model in errors else None
        written.append(
            Written(folder, report, _write_folder(folder, report), log_error, logs.fallback_reason)
        )
    return written


def _write_folder(folder: Path, report: RunReport) -> str | None:
    try:
        write_run_folder(folder, report)
    except OSError as error:
        return error.strerror or str(error)
    return None


def write_run_folder(folder: Path, report: RunReport) -> None:
    """Write every report file of one run. Raises OSError."""
    results = results_of(report, folder.name)
    atomic_write(folder / RESULTS_FILE, json.dumps(results, indent=1) + "\n")
