"""`results.json`: what a program wants to know about a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytest_npu.core.constants import RESULTS_SCHEMA

from .model import RunReport
from .timing import timing_of

RESULTS_FILE = "results.json"


_ENVIRONMENT = ("host", "python", "platform", "cpu", "versions", "argv", "rootdir", "options")
_PHASE = ("phase", "verdict", "in_tier", "counts", "duration_s", "lock_wait_s")
_TEST = (
    *("nodeid", "phase", "outcome", "duration_s", "lock_wait_s"),
    *("device_s", "reruns", "worker", "reason"),
)


def results_of(report: RunReport, run: str) -> dict[str, Any]:
    """The content of `results.json`; `run` is the name of the run's folder."""
    timing = timing_of(report)
    return {
        "schema": RESULTS_SCHEMA,
        "model": report.model,
        "run": run,
        "verdict": report.verdict,
        "finished": report.finished,
        "exit_status": report.exit_status,
        "started_at": report.started_at,
        "duration_s": round(report.ended_at - report.started_at, 3),
        "device": report.device,
        "deployment": report.deployment,
        "environment": _part(report.session, _ENVIRONMENT),
        "workers": report.workers,
        "preflight": report.preflight,
        "counts": report.counts,
        "phases": [_part(vars(phase), _PHASE) for phase in report.phases],
        "tests": [_part(vars(test), _TEST) for test in report.tests.values()],
        "collect_errors": [_part(error, ("nodeid", "longrepr")) for error in report.collect_errors],
        "deselected": report.deselected,
        "crashes": [_part(crash, ("nodeid", "cause", "detail")) for crash in report.crashes],
        "regressions": [_part(entry, ("nodeid", "reason")) for entry in report.regressions],
        "interrupts": report.interrupts,
        "poisoned": report.poisoned,
        "timing": None if timing is None else {k: v for k, v in vars(timing).items() if k != "rows"},
        "records": [_part(record, ("nodeid", "kind", "payload")) for record in report.records],
    }


def _part(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Entries by name; seconds to three decimal places, those of the device to six."""
    return {name: _rounded(name, values.get(name)) for name in names}


def _rounded(name: str, value: Any) -> Any:
    return round(value, 6 if name == "device_s" else 3) if name.endswith("_s") else value
