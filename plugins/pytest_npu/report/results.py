"""`results.json`: what a program wants to know about a run."""

from __future__ import annotations

from typing import Any

from pytest_npu.core.constants import RESULTS_SCHEMA

from .model import RunReport
from .timing import timing_of

RESULTS_FILE = "results.json"


def results_of(report: RunReport, run: str) -> dict[str, Any]:
    """The content of `results.json`; `run` is the name of the run's folder."""
    session = report.session
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
        "environment": {
            key: session.get(key)
            for key in ("host", "python", "platform", "cpu", "versions", "argv", "rootdir", "options")
        },
        "workers": report.workers,
        "preflight": report.preflight,
        "counts": report.counts,
        "phases": [
            {
                "phase": phase.phase,
                "verdict": phase.verdict,
                "in_tier": phase.in_tier,
                "counts": phase.counts,
                "duration_s": round(phase.duration_s, 3),
                "lock_wait_s": round(phase.lock_wait_s, 3),
            }
            for phase in report.phases
        ],
        "tests": [
            {
                "nodeid": test.nodeid,
                "phase": test.phase,
                "outcome": test.outcome,
                "duration_s": round(test.duration_s, 3),
                "lock_wait_s": round(test.lock_wait_s, 3),
                "device_s": round(test.device_s, 6),
                "reruns": test.reruns,
                "worker": test.worker,
                "reason": test.reason,
            }
            for test in report.tests.values()
        ],
        "collect_errors": [{"nodeid": e["nodeid"], "longrepr": e["longrepr"]} for e in report.collect_errors],
        "deselected": report.deselected,
        "crashes": [
            {key: crash.get(key) for key in ("nodeid", "cause", "detail")} for crash in report.crashes
        ],
        "regressions": [
            {"nodeid": entry["nodeid"], "reason": entry["reason"]} for entry in report.regressions
        ],
        "interrupts": report.interrupts,
        "poisoned": report.poisoned,
        "timing": _timing(report),
        "records": [
            {"nodeid": record.get("nodeid"), "kind": record["kind"], "payload": record["payload"]}
            for record in report.records
        ],
    }


def _timing(report: RunReport) -> dict[str, Any] | None:
    timing = timing_of(report)
    if timing is None:
        return None
    return {name: value for name, value in vars(timing).items() if name != "rows"}
