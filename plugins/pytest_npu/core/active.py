"""Hooks of a run that we take part in, and nothing else; each docstring names the hook it implements.

`wake` registers them: early when an option of ours is given, else when the first test of ours is met.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

from pytest_npu.bridges import xdist as xdist_bridge
from pytest_npu.core import session
from pytest_npu.core.constants import AWAKE, NPU2
from pytest_npu.core.header import header_lines
from pytest_npu.core.options import NpuOptions
from pytest_npu.core.session import finish
from pytest_npu.core.state import STATE, NpuState, Role, state_of
from pytest_npu.core.threads import let_threads_sleep
from pytest_npu.device.driver import Device, open_default_device
from pytest_npu.ledger import feature as ledger_bridge


def wake(config: pytest.Config) -> None:
    """Take part in this run: state, logs, and bridges to the options and plugins that are there. Once."""
    if config.pluginmanager.has_plugin(AWAKE):
        return
    state = session.create_state(config)
    config.stash[STATE] = state
    if state.role is not Role.CONTROLLER or state.is_expected():
        let_threads_sleep(config)
    config.pluginmanager.register(sys.modules[__name__], AWAKE)
    config.pluginmanager.register(SessionHooks(state), "npu-session")
    options = state.options
    if options.npu:
        from pytest_npu.device import silicon

        silicon.register(state)
    if options.adopt:
        from pytest_npu.features import adopt

        adopt.configure(state)
    if options.fault is not None:
        from pytest_npu.features import fault as faults

        faults.configure(config, options)
    if options.bisect:
        from pytest_npu.features import bisect as bisecting

        bisecting.configure(state)
    if options.trace is not None:
        from pytest_npu.features import trace as timeline_bridge

        timeline_bridge.register(state)
    xdist_bridge.register(state)
    if config.getoption("htmlpath", None) and state.is_expected():
        from pytest_npu.bridges import html as html_bridge

        html_bridge.register(config)
    session.require_device(state)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close what is open; `pytest_unconfigure`."""
    if STATE in config.stash:
        session.rescue(config.stash[STATE])
        config.stash[STATE].close()


def pytest_report_header(config: pytest.Config) -> list[str] | None:
    """Header when it is known early that we take part; `pytest_report_header`."""
    state = state_of(config)
    return header_lines(state) if session.header_is_known_early(state) else None


def pytest_report_collectionfinish(config: pytest.Config) -> list[str] | None:
    """Header when collected tests are ours; `pytest_report_collectionfinish`."""
    state = state_of(config)
    if not state.active or session.header_is_known_early(state) or config.get_verbosity() < 0:
        return None
    return header_lines(state)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Show the result of an earlier child of a supervised run; `pytest_runtest_protocol`."""
    return session.replay_if_done(state_of(item.config), item) or None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what a failed phase blocks; `pytest_runtest_setup`."""
    session.block_or_go_on(state_of(item.config), item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add phase, model, device and times to the report; `pytest_runtest_makereport`."""
    report = yield
    session.complete_report(state_of(item.config), item, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Results by phase and where the reports are; `pytest_terminal_summary`."""
    state = state_of(config)
    if state.written or state.deselected or state.timelines:
        from pytest_npu.core import terminal

        terminal.write_summary(terminalreporter, state)


@pytest.hookimpl(trylast=True)
def pytest_npu_open_device(name: str) -> Device:
    """Open a driver of the host runtime; `pytest_npu_open_device`."""
    return open_default_device(name)


@pytest.hookimpl(trylast=True)
def pytest_npu_open_deployment(folder: Path, options: NpuOptions, device: Device) -> Any:
    """Open a deployment of `llms.verify`; `pytest_npu_open_deployment`."""
    from pytest_npu.core.deployments import open_default_deployment

    return open_default_deployment(folder, options, device)


@pytest.hookimpl(trylast=True)
def pytest_npu_preflight(config: pytest.Config, device: Device | None) -> list[dict[str, Any]]:
    """Facts about the host, and about the NPU when AMD's driver opened it; `pytest_npu_preflight`."""
    from pytest_npu.device.preflight import feature as preflight

    on_silicon = device is not None and device.name == NPU2 and getattr(device, "module", None) is not None
    return (
        preflight.device_facts(state_of(config).options.lock_file) if on_silicon else preflight.host_facts()
    )


class SessionHooks:
    """Hooks whose arguments do not lead to the configuration; registered per run."""

    def __init__(self, state: NpuState) -> None:
        self._state = state

    def pytest_sessionstart(self) -> None:
        """After pytest's own faulthandler is set up: stacks go to the supervisor; `pytest_sessionstart`."""
        if self._state.stacks_file is not None:
            from pytest_npu.device.supervised import catch_fatal_signals

            catch_fatal_signals(self._state.stacks_file)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """A phase that lost a test gets no PASS in the ledger; `pytest_deselected`."""
        ledger_bridge.note_deselected(self._state, items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Log what could not be collected; `pytest_collectreport`."""
        session.log_collect_error(self._state, report)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Log the start of a test; `pytest_runtest_logstart`."""
        session.log_start(self._state, nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Log a phase of a test; `pytest_runtest_logreport`."""
        session.log_report(self._state, report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Log the end of a test; `pytest_runtest_logfinish`."""
        session.log_finish(self._state, nodeid)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Log Ctrl-C and `pytest.exit`; `pytest_keyboard_interrupt`."""
        session.log_interrupt(self._state, excinfo)

    def pytest_internalerror(self, excrepr: object) -> None:
        """Log an internal error; `pytest_internalerror`."""
        session.log_internal_error(self._state, str(excrepr))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, Any, Any]:
        """Write the reports before anything else can fail; `pytest_sessionfinish`."""
        finish(self._state, session, exitstatus)
        return (yield)
