"""Run folders: one per model and run, each with its event log; routes events to them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from pytest_npu.core.events import Event, EventLog

EVENTS_FILE = "events.jsonl"


def new_run_id() -> str:
    """Default name of a run: local date and time."""
    return time.strftime("%Y%m%d-%H%M%S")


def claim_run_folder(report_dir: Path, model: str, run_id: str) -> Path:
    """Create `report_dir/model/run_id`; a name that is taken gets `-2`, `-3` .. appended.

    `mkdir` decides the race, so two runs of the same second never share a folder.
    """
    parent = report_dir / model
    parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 10_000):
        folder = parent / (run_id if attempt == 1 else f"{run_id}-{attempt}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"no free run folder {parent / run_id}-N")


def fallback_dir() -> Path:
    """Where reports go when their folder cannot be written."""
    import tempfile

    return Path(tempfile.gettempdir()) / f"pytest-npu-reports-{os.getuid()}"


class RunLogs:
    """A sink that writes: one event log per model, opened when the model's first event arrives.

    Events without a model concern the whole session; they go to every log, also to those opened later.
    When the report folder cannot be written, the logs go to a folder below the system's temporary folder
    and `fallback_reason` says why; when that fails too, they stay in memory. `emit` never raises.
    """

    def __init__(self, report_dir: Path, run_id: str | None = None) -> None:
        self.report_dir = report_dir
        self.run_id = run_id or new_run_id()
        self.fallback_reason: str | None = None
        self._logs: dict[str, EventLog] = {}
        self._session_events: list[Event] = []
        self._lock = threading.RLock()

    def emit(self, event: Event) -> None:
        """Write one event to the log it belongs to."""
        model = event.get("model")
        with self._lock:
            if model is None:
                self._session_events.append(event)
                for name, log in self._logs.items():
                    log.append({**event, "model": name})
            else:
                self._log_of(str(model)).append(event)

    def _log_of(self, model: str) -> EventLog:
        log = self._logs.get(model)
        if log is None:
            try:
                log = self._open(model)
            except OSError as error:
                self.fallback_reason = f"{self.report_dir} cannot be written ({error.strerror or error})"
                self.report_dir = fallback_dir()
                try:
                    log = self._open(model)
                except OSError as second:
                    log = EventLog(self.report_dir / model / self.run_id / EVENTS_FILE, second)
            self._logs[model] = log
            for event in self._session_events:
                log.append({**event, "model": model})
        return log

    def _open(self, model: str) -> EventLog:
        return EventLog(claim_run_folder(self.report_dir, model, self.run_id) / EVENTS_FILE)

    @property
    def folders(self) -> dict[str, Path]:
        """Run folder of every model seen so far."""
        with self._lock:
            return {model: log.path.parent for model, log in self._logs.items()}

    def events(self, model: str) -> list[Event]:
        """Events of one model, including those that did not reach the disk."""
        return self._logs[model].events()

    def errors(self) -> dict[str, OSError]:
        """Models whose log could not be written completely."""
        return {model: log.error for model, log in self._logs.items() if log.error is not None}

    def close(self) -> None:
        """Close all logs."""
        for log in self._logs.values():
            log.close()
