"""`--npu-trace FILE`: the timeline of a run, recorded by the host toolkit, with a slice per test.

Every process that runs tests has a device and a clock of its own, hence a file of its own: `trace.gw0.json`
beside `trace.json` for worker gw0 of pytest-xdist.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.terminal import TerminalReporter

from pytest_npu.core.constants import QUESTIONS
from pytest_npu.core.events import Event
from pytest_npu.core.exceptions import DevicePoisoned, DeviceUnavailable
from pytest_npu.core.header import relative
from pytest_npu.core.state import NpuState, Role

if TYPE_CHECKING:
    from llms.llama_kernel_builder.timeline import Timeline


def file_of(path: Path, worker_id: str) -> Path:
    """The file of one process."""
    return path.with_name(f"{path.stem}.{worker_id}{path.suffix}") if worker_id else path


class TimelineFiles:
    """The files of timelines that this process knows of: path, events, error, unfinished."""

    def __init__(self, state: NpuState, path: Path) -> None:
        self._state = state
        self._path = path
        self._files: list[dict[str, Any]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """Where the timelines of this run are; `pytest_terminal_summary`."""
        for entry in self._files:
            for line in _lines(entry):
                terminalreporter.write_line(line)


class TimelineHooks(TimelineFiles):
    """Registered in every process that runs tests."""

    def __init__(self, state: NpuState, path: Path) -> None:
        super().__init__(state, path)
        self._timeline: Timeline | None = None

    def pytest_sessionstart(self) -> None:
        """Open the file; `pytest_sessionstart`."""
        try:
            from llms.llama_kernel_builder.timeline import Timeline, TimelineError
        except ImportError as error:
            raise pytest.UsageError(
                f"--npu-trace: the host toolkit llms.llama_kernel_builder cannot be imported ({error}); "
                "install the project: pip install -e ."
            ) from error
        try:
            device: Any = self._state.device.open()  # a driver of the host toolkit
        except DevicePoisoned:
            return  # nothing more runs on it
        except DeviceUnavailable as error:
            raise pytest.UsageError(f"--npu-trace: {error}") from error
        try:
            self._timeline = Timeline(self._path, device=device).__enter__()
        except TimelineError as error:
            raise pytest.UsageError(f"--npu-trace: {error}") from error

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """A slice per test; `pytest_runtest_protocol`."""
        if self._timeline is None:
            return (yield)
        from llms.llama_kernel_builder import timeline

        with timeline.span(self._state.device.open().clock, timeline.TESTS, "test", item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, Any, Any]:
        """Put the file into place and say so, before the log ends; `pytest_sessionfinish`."""
        self._close()
        return (yield)

    def pytest_unconfigure(self) -> None:
        """The same after a session that did not finish; `pytest_unconfigure`."""
        self._close()

    def _close(self) -> None:
        timeline, self._timeline = self._timeline, None
        if timeline is None:
            return
        timeline.close()
        fields: dict[str, Any] = {
            "path": str(timeline.path),
            "events": timeline.events,
            "error": timeline.error,
            "unfinished": [str(path) for path in timeline.recovered],
            "worker": self._state.worker_id,
        }
        self._files.append(fields)
        if self._state.active or self._state.role is Role.WORKER:
            self._state.emit("timeline", **fields)


class ControllerHooks(TimelineFiles):
    """Registered in the controller of pytest-xdist: what crashed workers left is kept."""

    def pytest_npu_event(self, event: Event) -> None:
        """A worker has put its file into place; `pytest_npu_event`."""
        if event["event"] == "timeline":
            self._files.append(event)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """After the workers are gone; `pytest_sessionfinish`."""
        from llms.llama_kernel_builder.timeline import keep_unfinished

        kept = keep_unfinished(self._path)
        if kept:
            fields = {"path": "", "events": 0, "error": "", "unfinished": [str(path) for path in kept]}
            self._files.append(fields)


def _lines(entry: dict[str, Any]) -> list[str]:
    lines = []
    if entry["path"]:
        problem = f", INCOMPLETE: {entry['error']}" if entry["error"] else ""
        lines.append(f"timeline: {relative(Path(entry['path']))} ({entry['events']} events{problem})")
    return lines + [
        f"timeline: {relative(Path(path))} is what a process that died left behind"
        for path in entry["unfinished"]
    ]


def register(state: NpuState, path: Path) -> None:
    """Register the hooks when tests will run."""
    config = state.config
    if any(config.getoption(name, None) for name in QUESTIONS):
        return
    if state.role is Role.CONTROLLER:
        config.pluginmanager.register(ControllerHooks(state, path), "npu-timeline")
        return
    config.pluginmanager.register(TimelineHooks(state, file_of(path, state.worker_id)), "npu-timeline")
