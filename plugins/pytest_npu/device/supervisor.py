"""The supervisor: a small parent process that survives what kills or hangs the tests.

It starts pytest as a child in a process group of its own, takes the child's events through a pipe, writes the
event logs, and at the end the reports. A test that hangs (also in native code that holds the interpreter
lock) or that takes its process down becomes an error with stacks and cause; the remaining tests run in a new
child, which replays the results so far. Nothing of the device is ever opened in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

from pytest_npu.core.constants import DEVICE_LABELS, FD_ENV, NPU2, QUESTIONS, REPORT_FIELD
from pytest_npu.core.events import Event, atomic_write, clip, make_event
from pytest_npu.core.models import ModelFolders, model_name
from pytest_npu.core.options import NpuOptions
from pytest_npu.core.phase_gate import PhaseGate
from pytest_npu.core.terminal import write_written
from pytest_npu.device.supervised import (
    CONTROL_ENV,
    ENDED_FILE,
    PAST_FILE,
    POISON_FILE,
    STACKS,
    STACKS_SIGNAL,
)
from pytest_npu.device.watchdog import Watchdog, Watched
from pytest_npu.report.runlogs import RunLogs
from pytest_npu.report.write import write_reports

#: Seconds a child gets to end on Ctrl-C before it is killed: pytest runs teardowns and writes its summary.
INTERRUPT_GRACE_S = 15.0
#: Seconds a process gets to write its stacks. faulthandler needs milliseconds.
STACKS_GRACE_S = 1.0
_TICK_S = 0.1


def wants_supervisor(config: pytest.Config, options: NpuOptions) -> bool:
    """True when this process should become the supervisor of a run."""
    get = config.getoption
    if not options.supervise or FD_ENV in os.environ or hasattr(config, "workerinput"):
        return False
    if config.invocation_params.plugins or threading.current_thread() is not threading.main_thread():
        return False  # a caller's plugin objects stay in its process; signals are for the main thread only
    return not any(get(name, None) for name in (*QUESTIONS, "usepdb", "trace"))


class Supervisor:
    """Runs pytest in child processes until every test has a result."""

    def __init__(self, config: pytest.Config, options: NpuOptions) -> None:
        self._config = config
        self._options = options
        self._logs = RunLogs(options.report_dir, options.run_id)
        self._control = Path(tempfile.mkdtemp(prefix="pytest-npu-"))
        self._gate = PhaseGate()
        self._folders = ModelFolders()
        self._tests: dict[str, Event] = {}
        self._reports: dict[str, list[dict[str, Any]]] = {}
        self._partial: dict[str, list[dict[str, Any]]] = {}
        self._benchmarks: dict[str, dict[str, Any]] = {}
        self._crashed: set[str] = set()
        self._ended: dict[str, str] = {}
        #: Worker ids whose events are not taken any more; the empty one stands for the whole child.
        self._silenced: set[str] = set()
        self._active = False
        self._interrupted = 0.0
        self._interrupts = 0
        self._orderly = False
        self._ended_by_us = False
        self._buffer = b""

    def run(self) -> int:
        """Run everything; returns the exit status of pytest."""
        handlers = {
            number: signal.signal(number, self._on_interrupt) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            status = self._run_children()
            self._report(status)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._logs.close()
            shutil.rmtree(self._control, ignore_errors=True)
        return status

    def _run_children(self) -> int:
        while True:
            known = len(self._reports)
            status = self._run_child()
            if self._orderly or self._interrupts:
                return status if status >= 0 else int(pytest.ExitCode.INTERRUPTED)
            if len(self._reports) == known:
                # It neither finished a test nor died in one: a usage error, or a crash outside of the tests.
                return status if status >= 0 else int(pytest.ExitCode.INTERNAL_ERROR)
            self._say("the remaining tests run in a new process; the results so far are shown again")

    # -- one child ---------------------------------------------------------------------------------------

    def _command(self) -> list[str]:
        script = Path(sys.argv[0])
        runner = (
            [str(script)] if script.name in ("pytest", "py.test") and script.is_file() else ["-m", "pytest"]
        )
        return [sys.executable, *runner, *map(str, self._config.invocation_params.args)]

    def _run_child(self) -> int:
        past = {
            "reports": self._reports,
            "failed_phases": self._gate.export(),
            "benchmarks": self._benchmarks,
        }
        atomic_write(self._control / PAST_FILE, json.dumps(past))
        self._orderly = self._ended_by_us = False
        self._silenced.clear()
        self._buffer = b""
        read_end, write_end = os.pipe()
        child = subprocess.Popen(
            self._command(),
            cwd=self._config.invocation_params.dir,
            env={**os.environ, FD_ENV: str(write_end), CONTROL_ENV: str(self._control)},
            pass_fds=(write_end,),
            start_new_session=True,
        )
        os.close(write_end)
        watchdog = Watchdog(self._options.hang_timeout)
        try:
            self._follow(child, read_end, watchdog)
        finally:
            os.close(read_end)
            if child.poll() is None:
                _kill_group(child.pid)
        status = child.wait()
        self._orderly = watchdog.session_over and status >= 0
        if not self._orderly:
            _kill_group(child.pid)  # what the dead process left behind
            if not self._interrupts and not self._ended_by_us:
                self._on_death(watchdog, status)
        return status

    def _follow(self, child: subprocess.Popen[bytes], pipe: int, watchdog: Watchdog) -> None:
        """Take messages until the child is gone and the pipe is empty."""
        os.set_blocking(pipe, False)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                gone = child.poll() is not None
                selector.select(0 if gone else _TICK_S)
                open_pipe = self._drain(pipe, watchdog)
                if gone or not open_pipe:
                    child.wait()
                    self._drain(pipe, watchdog)
                    return
                if self._interrupts:
                    self._end_interrupted(child, watchdog)
                elif (hang := watchdog.hung()) is not None:
                    self._on_hang(child, watchdog, hang)

    def _drain(self, pipe: int, watchdog: Watchdog) -> bool:
        """Read what is there; False at the end of the pipe."""
        while True:
            try:
                data = os.read(pipe, 1 << 20)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line), watchdog)

    def _take(self, event: Event, watchdog: Watchdog) -> None:
        if "" in self._silenced or str(event.get("worker") or "") in self._silenced:
            return
        watchdog.take(event)
        name, nodeid = event["event"], event.get("nodeid")
        if name == "_report":
            self._partial.setdefault(event["nodeid"], []).append(event["data"])
        elif name == "_finish":
            self._reports.setdefault(event["nodeid"], self._partial.pop(event["nodeid"], []))
        elif name == "_benchmark":
            self._benchmarks[event["nodeid"]] = event["data"]
        elif name == "_start":
            self._partial.pop(event["nodeid"], None)
        if name.startswith("_"):
            return
        self._active = True
        if name == "collected":
            self._tests.update({t["nodeid"]: {**t, "model": event["model"]} for t in event["tests"]})
        if name == "test_phase" and event["outcome"] == "failed":
            self._gate.note_failure(str(event["model"]), event.get("phase"), event["nodeid"])
        if name == "crash" and nodeid in self._crashed:
            return  # a worker that we ended ourselves; the cause is logged already
        self._logs.emit(event)

    # -- what can go wrong --------------------------------------------------------------------------------

    def _on_hang(self, child: subprocess.Popen[bytes], watchdog: Watchdog, hang: Watched) -> None:
        where = f"{hang.phase} of {hang.nodeid}" if hang.nodeid else "outside of any test"
        cause = f"hung: no sign of progress for {hang.limit:g} s ({where})"
        # From here on the verdict stands, whatever the process still sends: its stacks are taken, it dies.
        self._silenced.add(hang.worker)
        self._say(f"{cause}; collecting stacks and ending the process")
        stacks = self._stacks(child.pid, hang.pid)
        if hang.device and self._options.device == NPU2:
            self._poison(cause)
        self._note_crash(hang.nodeid, cause, stacks)
        watchdog.forget(hang.worker)
        if hang.worker and hang.pid is not None:
            # An xdist worker: its controller notices, and starts another one.
            self._ended[str(hang.nodeid)] = f"{cause}\n\n{stacks}"
            atomic_write(self._control / ENDED_FILE, json.dumps(self._ended))
            _kill(hang.pid)
        else:
            self._ended_by_us = True
            _kill_group(child.pid)

    def _on_death(self, watchdog: Watchdog, status: int) -> None:
        """The child is gone although it was not told to go."""
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        stacks = self._read_stacks()
        running = watchdog.running()
        if running:
            for process in running:
                self._note_crash(process.nodeid, f"the process died ({how})", stacks)
        elif status < 0:
            self._note_crash(None, f"the process died outside of any test ({how})", stacks)

    def _note_crash(self, nodeid: str | None, cause: str, stacks: str) -> None:
        """Log a crash, and make it a result that the next child shows."""
        if nodeid is None:
            if self._active:
                self._logs.emit(make_event("crash", nodeid=None, cause=cause, detail=stacks))
            self._say(cause)
            return
        self._crashed.add(nodeid)
        info = self._tests.get(nodeid)
        text = f"{cause}\n\n{stacks}".strip()
        self._partial.pop(nodeid, None)
        self._reports[nodeid] = self._as_reports(nodeid, text, info)
        if info is not None:
            model, number = str(info["model"]), info["phase"]
            self._gate.note_failure(model, number, nodeid)
            self._logs.emit(
                make_event(
                    "crash", model=model, nodeid=nodeid, phase=number, cause=cause, detail="", stacks=stacks
                )
            )

    def _as_reports(self, nodeid: str, text: str, info: Event | None) -> list[dict[str, Any]]:
        """Reports that every consumer counts as one error.

        pytest and JUnit count the failed setup, pytest-html waits for the teardown. What the test reported
        before its process died is left out.
        """
        location = (nodeid.split("::", 1)[0], None, nodeid.partition("::")[2].replace("::", "."))
        reports = [
            pytest.TestReport(nodeid, location, {}, "failed", text, "setup"),
            pytest.TestReport(nodeid, location, {}, "passed", None, "teardown"),
        ]
        if info is not None:
            folder = self._folders.of_nodeid(nodeid, self._config.rootpath)
            fields = {
                "model": model_name(folder),
                "phase": info["phase"],
                "device": DEVICE_LABELS[self._options.device],
            }
            for report in reports:
                setattr(report, REPORT_FIELD, fields)
        serialise = self._config.hook.pytest_report_to_serializable
        return [serialise(config=self._config, report=report) for report in reports]

    def _poison(self, cause: str) -> None:
        path = self._control / POISON_FILE
        if not path.exists():
            atomic_write(path, cause)
            self._logs.emit(make_event("poisoned", cause=cause))
            self._say("the device is out of use for the rest of this run")

    # -- interrupts ---------------------------------------------------------------------------------------

    def _on_interrupt(self, number: int, frame: object) -> None:
        self._interrupts += 1
        self._interrupted = self._interrupted or time.monotonic()

    def _end_interrupted(self, child: subprocess.Popen[bytes], watchdog: Watchdog) -> None:
        """Pass Ctrl-C on; a child that does not end in time, or a second Ctrl-C, ends it the hard way."""
        if self._interrupted > 0:
            os.kill(child.pid, signal.SIGINT)
            self._interrupted = -time.monotonic()
        waited = time.monotonic() + self._interrupted
        if self._interrupts < 2 and waited < INTERRUPT_GRACE_S:
            return
        running = [process.nodeid for process in watchdog.running()]
        if self._active:
            reason = "interrupted by the user (Ctrl-C), the process did not end by itself and was killed"
            self._logs.emit(make_event("interrupt", reason=reason, nodeid=running[0] if running else None))
        _kill_group(child.pid)
        child.wait()

    # -- stacks and output --------------------------------------------------------------------------------

    def _stacks(self, session: int, pid: int | None) -> str:
        folder = self._control / STACKS
        for each in [int(path.name) for path in folder.glob("*")]:
            if (pid is None or each == pid) and _session_of(each) == session:
                _kill(each, STACKS_SIGNAL)
        deadline, size = time.monotonic() + STACKS_GRACE_S, -1
        while time.monotonic() < deadline and (size <= 0 or size != self._stacks_size()):
            size = self._stacks_size()  # they are complete when the files stop growing
            time.sleep(0.1)
        return self._read_stacks() or "no stacks: the process did not react to the request"

    def _stacks_size(self) -> int:
        return sum(path.stat().st_size for path in (self._control / STACKS).glob("*"))

    def _read_stacks(self) -> str:
        """Take the stacks that processes left, and clear them."""
        texts = []
        for path in sorted((self._control / STACKS).glob("*")):
            text = path.read_text(errors="replace").strip("\0\n ")
            if text:
                texts.append(text)
                os.truncate(path, 0)
        return clip("\n\n".join(texts), 30_000)

    def _say(self, text: str) -> None:
        print(f"\nnpu supervisor: {text}", flush=True)

    def _report(self, status: int) -> None:
        if not self._active:
            return
        if not self._orderly:
            self._logs.emit(make_event("session_finish", exit_status=status))
        reports = write_reports(self._logs)
        if hasattr(self._config.option, "color"):  # not with -p no:terminal
            reporter = TerminalReporter(self._config)
            for written in reports:
                write_written(reporter, written)
        self._config.hook.pytest_npu_reports(config=self._config, folders=self._logs.folders)


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _kill_group(pid: int) -> None:
    """End a child and everything it started that is still in its process group."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
