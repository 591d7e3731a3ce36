"""Decides when a process hangs: no sign of progress for longer than the limit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pytest_npu.core.events import Event

#: Collection, start and end of a session get this many times the limit of a test: importing everything on a
#: busy machine takes longer than any single step of a test.
SESSION_FACTOR = 4


@dataclass
class Watched:
    """One process that runs tests: an xdist worker, or the only one (worker id empty)."""

    pid: int | None = None
    nodeid: str | None = None
    device: bool = False
    limit: float | None = None
    phase: str = "setup"
    last_progress: float = field(default_factory=time.monotonic)
    waits_for_lock: bool = False


@dataclass(frozen=True)
class Hang:
    """A process without progress."""

    worker: str
    pid: int | None
    nodeid: str | None
    device: bool
    phase: str
    limit: float


_NEXT_PHASE = {"setup": "call", "call": "teardown", "teardown": "teardown"}


class Watchdog:
    """Follows the messages of a run and says who hangs. Waiting for the NPU lock is no hang."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._processes: dict[str, Watched] = {}
        self._session = time.monotonic()
        self.session_over = False

    def running(self) -> dict[str, Watched]:
        """Processes that are inside a test, by worker id."""
        return {worker: process for worker, process in self._processes.items() if process.nodeid is not None}

    def forget(self, worker: str) -> None:
        """A process is gone."""
        self._processes.pop(worker, None)
        self._session = time.monotonic()

    def take(self, event: Event) -> None:
        """Learn from a message of the child."""
        now = time.monotonic()
        self._session = now
        name, worker = event["event"], str(event.get("worker") or "")
        if name == "_session_finish":
            self.session_over = True
        if name == "_start":
            limit = event["limit"]
            self._processes[worker] = Watched(event["pid"], event["nodeid"], bool(event["device"]), limit)
            return
        process = self._processes.get(worker)
        if process is None:
            return
        process.last_progress = now
        if name == "_report":
            process.phase = _NEXT_PHASE.get(event["when"], "teardown")
        elif name == "_finish":
            process.nodeid = None
        elif name == "lock":
            process.waits_for_lock = event["action"] == "waiting"

    def hung(self) -> Hang | None:
        """The first process that is over its limit, or None."""
        now = time.monotonic()
        running = self.running()
        for worker, process in running.items():
            limit = self.limit if process.limit is None else process.limit
            if limit > 0 and not process.waits_for_lock and now - process.last_progress > limit:
                return Hang(worker, process.pid, process.nodeid, process.device, process.phase, limit)
        limit = self.limit * SESSION_FACTOR
        if not running and limit > 0 and now - self._session > limit:
            return Hang("", None, None, False, "between tests", limit)
        return None
