"""The log of the tests: start, phases and end of each, interrupts and internal errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from typing import Any

import pytest

from pytest_npu.bridges.syrupy import keep_snapshots
from pytest_npu.core.constants import DEVICE_LABELS, REPORT_FIELD, TWIN
from pytest_npu.core.events import Event, clip
from pytest_npu.core.phase_gate import BLOCKED_BY
from pytest_npu.core.state import NpuState, Role, TestInfo


class TestLogHooks:
    """Logs what happens to tests that are ours; owns failures, attempts and times between two reports."""

    __test__ = False

    def __init__(self, state: NpuState, hang_limits: Mapping[str, float]) -> None:
        self._state = state
        self._hang_limits = hang_limits
        self._failed: set[str] = set()
        self._attempts: Counter[str] = Counter()
        #: Seconds the running phase of the running test waited for the lock.
        self._lock_wait_s = 0.0
        #: Device clock at the last report, seconds.
        self._device_mark = 0.0

    def _is_logged(self, nodeid: str) -> bool:
        """Workers log for their controller, an earlier child has logged what is replayed."""
        return self._state.role is not Role.CONTROLLER and nodeid not in self._state.replayed

    def pytest_npu_event(self, event: Event) -> None:
        """Time spent waiting for the lock belongs to the running test; `pytest_npu_event`."""
        if event["event"] == "lock" and event["action"] in ("acquired", "timeout"):
            self._lock_wait_s += event["waited_s"]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add phase, model, device and times to the report; `pytest_runtest_makereport`."""
        report = yield
        info = self._state.tests.get(item.nodeid)
        if info is not None:
            fields = {
                "model": info.model,
                "phase": info.phase,
                "device": DEVICE_LABELS[self._state.device.name],
                "blocked_by": item.stash.get(BLOCKED_BY, ""),
                "lock_wait_s": self._lock_wait_s,
                "device_s": self._device_time(),
                "worker": self._state.worker_id,
            }
            setattr(report, REPORT_FIELD, fields)
            self._lock_wait_s = 0.0
        return report

    def _device_time(self) -> float:
        """Modelled device time since the last report of a phase; silicon has no such clock."""
        device = self._state.device
        if device.name != TWIN or device.opened is None:
            return 0.0
        now = device.now()
        spent, self._device_mark = now - self._device_mark, now
        return max(0.0, spent)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Log the start of a test; `pytest_runtest_logstart`."""
        state = self._state
        state.current = info = state.tests.get(nodeid)
        if info is not None and self._is_logged(nodeid):
            state.emit(
                "test_start",
                model=info.model,
                nodeid=nodeid,
                phase=info.phase,
                worker=state.worker_id,
                hang_limit_s=self._hang_limits.get(nodeid),
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Log setup, call or teardown of a test; `pytest_runtest_logreport`."""
        info = self._state.tests.get(report.nodeid)
        if info is not None and self._is_logged(report.nodeid):
            self._log_phase(info, report)

    def _log_phase(self, info: TestInfo, report: pytest.TestReport) -> None:
        emit = self._state.emit
        if report.failed:
            self._failed.add(report.nodeid)
        fields: dict[str, Any] = getattr(report, REPORT_FIELD, {})
        if str(report.outcome) == "rerun":  # an outcome of pytest-rerunfailures
            self._attempts[report.nodeid] += 1
            emit(
                "retry",
                model=info.model,
                nodeid=report.nodeid,
                cause=clip(report.longreprtext, 2000),
                attempt=self._attempts[report.nodeid],
            )
        emit(
            "test_phase",
            model=info.model,
            nodeid=report.nodeid,
            phase=info.phase,
            when=report.when,
            outcome=report.outcome,
            duration_s=report.duration,
            longrepr=clip(_reason(report)),
            sections=[(title, clip(body, 20_000)) for title, body in report.sections]
            if report.failed
            else [],
            wasxfail=getattr(report, "wasxfail", None),
            blocked_by=fields.get("blocked_by", ""),
            lock_wait_s=fields.get("lock_wait_s", 0.0),
            device_s=fields.get("device_s", 0.0),
            worker=self._state.worker_id,
        )

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Log the end of a test; `pytest_runtest_logfinish`."""
        state = self._state
        state.current = None
        if not self._is_logged(nodeid):
            return
        if nodeid in self._failed:
            keep_snapshots(state.config, nodeid)
        info = state.tests.get(nodeid)
        if info is not None:
            state.emit("test_finish", model=info.model, nodeid=nodeid, worker=state.worker_id)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Log Ctrl-C and `pytest.exit`; `pytest_keyboard_interrupt`."""
        state = self._state
        if state.role is Role.WORKER or not state.active:
            return
        # pytest and pytest-xdist stop a session by subclasses that carry the reason: -x, errors of collection
        by_user = excinfo.type is KeyboardInterrupt or not str(excinfo.value)
        reason = "interrupted by the user (Ctrl-C)" if by_user else str(excinfo.value)
        state.emit("interrupt", reason=reason, nodeid=state.current.nodeid if state.current else None)

    def pytest_internalerror(self, excrepr: object) -> None:
        """Log an internal error of pytest or of a plugin; `pytest_internalerror`."""
        state = self._state
        if state.active and state.role is not Role.WORKER:
            cause = "internal error of pytest or a plugin"
            state.emit("crash", nodeid=None, cause=cause, detail=clip(str(excrepr)))


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext
