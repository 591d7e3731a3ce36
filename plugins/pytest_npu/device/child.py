"""A run under a supervisor, seen from its child: tell what runs, show what earlier children did."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from typing import IO, Any

import pytest

from pytest_npu.bridges import benchmark_session
from pytest_npu.bridges.syrupy import keep_snapshots
from pytest_npu.core.state import NpuState, Role
from pytest_npu.device import supervised


class ChildHooks:
    """Registered under a supervisor, in workers too; owns what happened before.

    The supervisor is told of every test, ours or not.
    """

    def __init__(
        self, state: NpuState, past: supervised.Past, stacks: IO[str], hang_limits: Mapping[str, float]
    ) -> None:
        self._state = state
        self._past = past
        self._stacks = stacks
        self._hang_limits = hang_limits

    def _tell(self, event: str, **fields: Any) -> None:
        state = self._state
        state.sink.emit({"event": event, "worker": state.worker_id, "pid": os.getpid(), **fields})

    def _tells(self, nodeid: str) -> bool:
        """The controller runs nothing itself, and what is replayed was told before."""
        return self._state.role is not Role.CONTROLLER and nodeid not in self._past.reports

    def pytest_sessionstart(self) -> None:
        """After pytest's own faulthandler is set up: stacks go to the supervisor; `pytest_sessionstart`."""
        supervised.catch_fatal_signals(self._stacks)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Show the result of an earlier child instead of running the test; `pytest_runtest_protocol`."""
        reports = self._past.reports.get(item.nodeid)
        if reports is None:
            return None
        supervised.replay(item, reports)
        keep_snapshots(item.config, item.nodeid)
        if item.nodeid in self._past.benchmarks:
            benchmark_session.take_over(item.config, self._past.benchmarks[item.nodeid])
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins, ours or not; `pytest_runtest_logstart`."""
        if self._tells(nodeid):
            info = self._state.tests.get(nodeid)
            device = info is not None and info.device
            self._tell("_start", nodeid=nodeid, limit=self._hang_limits.get(nodeid), device=device)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test is over; `pytest_runtest_logreport`."""
        if self._tells(report.nodeid):
            config = self._state.config
            data = config.hook.pytest_report_to_serializable(config=config, report=report)
            self._tell("_report", nodeid=report.nodeid, when=report.when, data=data)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test is over, after its end is logged; `pytest_runtest_logfinish`."""
        if self._tells(nodeid):
            measured = benchmark_session.measured(self._state.config, nodeid)
            if measured:
                self._tell("_benchmark", nodeid=nodeid, data=measured)
            self._tell("_finish", nodeid=nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, Any, Any]:
        """The process is about to end in an orderly way; `pytest_sessionfinish`."""
        if self._state.role is not Role.WORKER:
            self._tell("_session_finish")
        return (yield)
