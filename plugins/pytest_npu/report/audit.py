"""The report of an audit that ran outside of pytest (`python -m llms.audit`): a run folder like any other."""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_npu.core.events import Event, EventLog, atomic_write, make_event, to_jsonable

from .index import write_index
from .model import build_run_report
from .runlogs import EVENTS_FILE, claim_run_folder, new_run_id
from .write import write_run_folder

NODEID = "python -m llms.audit"
PHASE = 7


def write_audit(payload: Mapping[str, Any], started_at: float, out: Path | None = None) -> Path:
    """Write `evaluation_report.md`, `report.html` and the other files of a run, and `audit.json`.

    Args:
        payload: what the audit found, a record of kind `audit`.
        started_at: when it began, seconds since the epoch.
        out: folder for the files; default a new one, `reports/<model>/<date and time>-audit`, that the index
            lists.

    Returns:
        The folder. Raises OSError when it cannot be written.
    """
    model, plain = str(payload["model"]), to_jsonable(payload)
    folder = out if out is not None else claim_run_folder(Path("reports"), model, f"{new_run_id()}-audit")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EVENTS_FILE).unlink(missing_ok=True)
    log = EventLog(folder / EVENTS_FILE)
    try:
        for event in _events(model, plain, started_at):
            log.append(event)
        write_run_folder(folder, build_run_report(model, log.events()))
    finally:
        log.close()
    atomic_write(folder / "audit.json", json.dumps(plain, indent=1, allow_nan=False))
    if out is None:
        write_index(folder.parent.parent)
    return folder


def _events(model: str, payload: Mapping[str, Any], started_at: float) -> Iterator[Event]:
    """The audit as one test of phase 7."""
    failed = [f for f in payload["findings"] if f["status"] == "FAIL"]
    session = {"command": payload["command"], "host": socket.gethostname()}
    yield {
        **make_event("session_start", run_id="", python=platform.python_version(), **session),
        "t": started_at,
    }
    yield make_event("device", name="", label=payload["device"], details={})
    yield make_event("deployment", checkpoint=payload["checkpoint"], config={}, folder=None, variant=None)
    test: dict[str, Any] = {"nodeid": NODEID, "phase": PHASE, "worker": ""}
    yield make_event("collected", tests=[test])
    yield make_event("test_start", **test)
    yield make_event("record", nodeid=NODEID, kind="audit", payload=payload)
    yield make_event(
        "test_phase",
        **test,
        when="call",
        outcome="passed" if payload["verdict"] != "FAIL" else "failed",
        duration_s=payload["seconds"],
        longrepr="\n".join(f"{f['question']} {f['evidence']}" for f in failed),
    )
    yield make_event("test_finish", nodeid=NODEID, worker="")
    yield make_event("session_finish", exit_status=int(payload["verdict"] == "FAIL"))
