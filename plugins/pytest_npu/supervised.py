"""The child's side of a supervised run: events and test reports go to the supervisor through a pipe."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .events import Event

if TYPE_CHECKING:
    from .state import NpuState

#: Descriptor of the pipe to the supervisor.
FD_ENV = "PYTEST_NPU_SUPERVISOR_FD"
#: JSON file with what happened before this child was started.
PAST_ENV = "PYTEST_NPU_SUPERVISOR_PAST"
#: Event that carries a serialised test report; for the supervisor only, it is not logged.
REPORT_EVENT = "_report"


@dataclass(frozen=True)
class Past:
    """What earlier children of this run did.

    `reports`: serialised test reports by node id, of every test that is over; `poisoned`: why the device must
    not be used any more, or None.
    """

    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed_phases: dict[str, dict[str, str]] = field(default_factory=dict)
    poisoned: str | None = None


class PipeSink:
    """Writes events to the supervisor, one line each."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Send one event; without a supervisor there is nobody left to tell."""
        data = (json.dumps(event, default=str) + "\n").encode()
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                pass


def is_supervised() -> bool:
    """True in a child of the supervisor."""
    return FD_ENV in os.environ


@lru_cache(maxsize=1)
def pipe_sink() -> PipeSink | None:
    """The sink to the supervisor, None in a run without one.

    The variable is taken out of the environment, so that processes started by tests are on their own.
    """
    fd = os.environ.pop(FD_ENV, None)
    return None if fd is None else PipeSink(int(fd))


@lru_cache(maxsize=1)
def past() -> Past:
    """What happened before this child started."""
    path = os.environ.pop(PAST_ENV, None)
    return Past() if path is None else Past(**json.loads(Path(path).read_text(encoding="utf-8")))


def forward_report(state: NpuState, report: pytest.TestReport) -> None:
    """Give a test report to the supervisor, which keeps it for a child that may have to follow."""
    sink = state.sink
    if isinstance(sink, PipeSink):
        data = state.config.hook.pytest_report_to_serializable(config=state.config, report=report)
        sink.emit({"event": REPORT_EVENT, "nodeid": report.nodeid, "data": data})
