"""The child's side of a supervised run.

Events go to the supervisor through a pipe, and so do control messages (names beginning with an underscore),
which are not logged: what runs now, and every finished test report. A child that follows a dead one replays
those reports first, so that its terminal output, JUnit file, pytest-html page and exit code cover the whole
run.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from pytest_npu.core.constants import FD_ENV
from pytest_npu.core.events import Event

#: Folder in which supervisor and child leave files for each other.
CONTROL_ENV = "PYTEST_NPU_SUPERVISOR_DIR"

PAST_FILE = "past.json"
POISON_FILE = "poisoned"
#: Node id -> text of tests whose xdist worker the supervisor ended.
ENDED_FILE = "ended.json"
STACKS = "stacks"
#: Asks a process for the stacks of all its threads. faulthandler answers from the signal handler itself, so
#: it also works in native code that holds the interpreter lock.
STACKS_SIGNAL: int = getattr(signal, "SIGRTMIN", 30) + 5  # other systems import this module, too

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, eq=False)
class Past:
    """What earlier children of this run did.

    `reports`: serialised test reports by node id, of every test that is over.
    """

    reports: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed_phases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    #: Measurements of pytest-benchmark by node id, as its JSON files have them.
    benchmarks: Mapping[str, dict[str, Any]] = field(default_factory=dict)


class PipeSink:
    """Writes events to the supervisor, one line each; `control` is a folder shared with it."""

    def __init__(self, fd: int, control: Path) -> None:
        self.control = control
        self._fd = fd
        self._lock = threading.Lock()
        os.set_inheritable(fd, False)

    def emit(self, event: Event) -> None:
        """Send one event; without a supervisor there is nobody left to tell."""
        data = (json.dumps(event, default=str) + "\n").encode()
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                pass


def claim_link() -> PipeSink | None:
    """The way to the supervisor of this process, None in a run without one.

    The settings are taken out of the environment: a pytest that a test starts, here or in another process, is
    on its own.
    """
    fd, control = os.environ.pop(FD_ENV, None), os.environ.pop(CONTROL_ENV, None)
    return None if fd is None or control is None else PipeSink(int(fd), Path(control))


def load_past(control: Path | None) -> Past:
    """What happened before this child started."""
    path = None if control is None else control / PAST_FILE
    if path is None or not path.exists():
        return Past()
    return Past(**json.loads(path.read_text(encoding="utf-8")))


def poison_of(control: Path | None) -> str | None:
    """Why the device must not be used any more, or None. Asked again before every use."""
    try:
        return None if control is None else (control / POISON_FILE).read_text(encoding="utf-8")
    except OSError:
        return None


def why_ended(control: Path | None, nodeid: str) -> str | None:
    """What the supervisor says about a test whose worker it ended."""
    try:
        ended: dict[str, str] = (
            {} if control is None else json.loads((control / ENDED_FILE).read_text("utf-8"))
        )
    except OSError:
        return None
    return ended.get(nodeid)


def prepare_for_the_worst(control: Path) -> IO[str]:
    """Let this process die with its parent, and answer the supervisor's question for stacks.

    Returns the file that the stacks go to; it must stay open.
    """
    import ctypes
    import faulthandler

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    folder = control / STACKS
    folder.mkdir(exist_ok=True)
    file = (folder / f"{os.getpid()}").open("w")
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    return file


def catch_fatal_signals(file: IO[str]) -> None:
    """Send the stacks of a segmentation fault to the supervisor's file instead of to the terminal."""
    import faulthandler

    faulthandler.enable(file=file, all_threads=True)


def replay(item: pytest.Item, reports: list[dict[str, Any]]) -> None:
    """Report what an earlier child found, without running the test."""
    config = item.config
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in reports:
        report = config.hook.pytest_report_from_serializable(config=config, data=dict(data))
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
