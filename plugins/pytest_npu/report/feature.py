"""The reports of a run: header, files, summary in the terminal; owns the event logs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

from pytest_npu.core.header import header_lines
from pytest_npu.core.state import NpuState, Role
from pytest_npu.report.runlogs import RunLogs
from pytest_npu.report.write import Written


class ReportHooks:
    """Writes the reports of this process; `logs` is None where another one does it, or where nothing runs."""

    def __init__(self, state: NpuState, logs: RunLogs | None) -> None:
        self._state = state
        self._logs = logs
        self._written: list[Written] = []
        #: The end of the session is logged, or what there is was reported without it.
        self._finished = False

    def _header_is_known_early(self) -> bool:
        """True when the header can be printed before the collection."""
        state = self._state
        return state.options.asked or (state.role is Role.CONTROLLER and state.is_expected())

    def pytest_report_header(self) -> list[str] | None:
        """Header when it is known early that we take part; `pytest_report_header`."""
        return header_lines(self._state) if self._header_is_known_early() else None

    def pytest_report_collectionfinish(self, config: pytest.Config) -> list[str] | None:
        """Header when collected tests are ours; `pytest_report_collectionfinish`."""
        if not self._state.active or self._header_is_known_early() or config.get_verbosity() < 0:
            return None
        return header_lines(self._state)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Write the reports before anything else can fail; `pytest_sessionfinish`."""
        state = self._state
        if state.active and state.role is not Role.WORKER:
            exit_status = int(session.exitstatus)
            state.emit("session_finish", exit_status=exit_status)
            self._write()
            if self._logs is not None:
                if exit_status == pytest.ExitCode.INTERNAL_ERROR:  # pytest prints no summary then
                    self._tell_paths()
                state.config.hook.pytest_npu_reports(config=state.config, folders=self._logs.folders)
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """Results by phase and where the reports are; `pytest_terminal_summary`."""
        if self._written:
            from pytest_npu.core import terminal

            for written in self._written:
                terminal.write_written(terminalreporter, written)

    def pytest_unconfigure(self) -> None:
        """Report a session that was cut short, for example by a second Ctrl-C; `pytest_unconfigure`."""
        if self._logs is None:
            return
        if self._state.active and not self._finished:
            self._state.emit("interrupt", reason="the session was cut short", nodeid=None)
            self._write()
            self._tell_paths()
        self._logs.close()

    def _write(self) -> None:
        from pytest_npu.report.write import write_reports

        self._finished = True
        if self._logs is not None:
            self._written = write_reports(self._logs)

    def _tell_paths(self) -> None:
        from pytest_npu.core import terminal

        for written in self._written:
            self._state.tell_user("\n".join(terminal.path_lines(written)))
