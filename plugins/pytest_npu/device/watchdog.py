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
    """One process that runs tests: an xdist worker, or the only one (worker id empty).

    `limit` in seconds; `phase` is what the running test is in, `nodeid` None outside of any test.
    """

    worker: str
    limit: float
    pid: int | None = None
    nodeid: str | None = None
    device: bool = False
    phase: str = "setup"
    last_progress: float = field(default_factory=time.monotonic)
    waits_for_lock: bool = False


_NEXT_PHASE = {"setup": "call", "call": "teardown"}


class Watchdog:
    """Follows the messages of a run and says who hangs. Waiting for the NPU lock is no hang."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._processes: dict[str, Watched] = {}
        self._session = time.monotonic()
        self.session_over = False

    def running(self) -> list[Watched]:
        """Processes that are inside a test."""
        return [process for process in self._processes.values() if process.nodeid is not None]

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
            limit = self.limit if event["limit"] is None else event["limit"]
            self._processes[worker] = Watched(
                worker, limit, event["pid"], event["nodeid"], bool(event["device"])
            )
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

    def hung(self) -> Watched | None:
        """The first process that is over its limit, or None."""
        now = time.monotonic()
        running = self.running()
        for process in running:
            silent_s = now - process.last_progress
            if 0 < process.limit < silent_s and not process.waits_for_lock:
                return process
        limit = self.limit * SESSION_FACTOR
        return Watched("", limit) if not running and 0 < limit < now - self._session else None
