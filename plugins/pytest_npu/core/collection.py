"""The collection: which tests are ours, in which order they run, what is left out and why."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.terminal import TerminalReporter

from pytest_npu.bridges import xdist as xdist_bridge
from pytest_npu.bridges.benchmark import XDIST_REASON, use_device_clock
from pytest_npu.bridges.rerun import allow_retries
from pytest_npu.core.constants import NPU2
from pytest_npu.core.events import Event, clip
from pytest_npu.core.models import fixture_names, is_ours, is_perf_test, model_name, uses_device
from pytest_npu.core.phases import order_by_phase, phase_of
from pytest_npu.core.state import NpuState, Role, TestInfo

if TYPE_CHECKING:
    from pytest_npu.ledger.feature import LedgerHooks


class CollectionHooks:
    """Takes the collected tests that are ours; owns time limits and the tests that were taken out."""

    def __init__(self, state: NpuState, ledger: LedgerHooks) -> None:
        self._state = state
        self._ledger = ledger
        #: Seconds from `@pytest.mark.npu_hang_timeout`, by node id.
        self.hang_limits: dict[str, float] = {}
        self._deselected: dict[str, str] = {}

    def take(self, items: list[pytest.Item]) -> None:
        """Order, deselect and log the collected tests that are ours; after everybody else has selected."""
        state = self._state
        for item in items:
            mark = item.get_closest_marker("npu_hang_timeout")
            if mark is not None:
                self.hang_limits[item.nodeid] = _hang_limit(item, mark)
        if state.replayed:  # what an earlier child did is shown first, so that no fixture is open meanwhile
            items.sort(key=lambda item: item.nodeid not in state.replayed)
        ours = {item: state.folders.of(item.path) for item in items if is_ours(item, state.folders)}
        if not ours:
            return
        state.activate()
        if state.role is Role.WORKER:
            xdist_bridge.introduce_worker(state)
        if state.config.getoption("benchmark_only", False):
            self._keep_perf_tests_only(items, ours)
        if state.options.phase_order:
            order_by_phase(items, lambda item: str(ours[item]) if ours.get(item) is not None else None)
        by_model: dict[str, list[TestInfo]] = {}
        for item in items:
            if item in ours:
                info = self._register(item, ours[item])
                by_model.setdefault(info.model, []).append(info)
        for model, tests in by_model.items():
            folder = tests[0].folder
            state.emit(
                "collected",
                model=model,
                tests=[
                    {"nodeid": info.nodeid, "phase": info.phase, "perf": info.perf, "device": info.device}
                    for info in tests
                ],
                folder=str(folder or ""),
                whole=self._ledger.whole_phases(folder, tests),
            )

    def _register(self, item: pytest.Item, folder: Path | None) -> TestInfo:
        state = self._state
        perf, device = is_perf_test(item), uses_device(item)
        info = TestInfo(item.nodeid, model_name(folder), folder, phase_of(item), perf, device)
        state.tests[item.nodeid] = info
        if device and state.device.name == NPU2:
            allow_retries(item)
        if perf:
            use_device_clock(item, state)
        return info

    def _keep_perf_tests_only(self, items: list[pytest.Item], ours: dict[pytest.Item, Path | None]) -> None:
        """`--benchmark-only` selects; pytest-benchmark itself skips everything else, one by one."""
        others = [item for item in ours if "benchmark" not in fixture_names(item)]
        for item in others:
            del ours[item]
        self._take_out(items, others)

    def _take_out(self, items: list[pytest.Item], others: list[pytest.Item]) -> None:
        if others:
            dropped = set(others)
            items[:] = [item for item in items if item not in dropped]
            self._state.config.hook.pytest_deselected(items=others)

    def deselect_perf_tests(self, items: list[pytest.Item]) -> None:
        """In a worker of pytest-xdist: take out what measures, with the reason."""
        perf = [item for item in items if is_perf_test(item)]
        self._take_out(items, perf)
        by_model: dict[str, list[str]] = {}
        for item in perf:
            by_model.setdefault(model_name(self._state.folders.of(item.path)), []).append(item.nodeid)
        for model, nodeids in by_model.items():
            self._state.emit("deselected", model=model, nodeids=nodeids, reason=XDIST_REASON)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Log a module below a model folder that cannot be collected; `pytest_collectreport`."""
        state = self._state
        if not report.failed or state.role is Role.CONTROLLER or not report.nodeid:
            return
        folder = state.folders.of_nodeid(report.nodeid, state.config.rootpath)
        if folder is None:
            return
        state.activate()
        text = clip(str(report.longrepr or ""))
        state.emit("collect_error", model=model_name(folder), nodeid=report.nodeid, longrepr=text)

    def pytest_npu_event(self, event: Event) -> None:
        """Tests of workers, and what they took out; `pytest_npu_event`."""
        state = self._state
        if event["event"] == "deselected":
            self._deselected.update(dict.fromkeys(event["nodeids"], event["reason"]))
        elif event["event"] == "collected" and state.role is Role.CONTROLLER:
            for test in event["tests"]:
                nodeid = test["nodeid"]
                folder = state.folders.of_nodeid(nodeid, state.config.rootpath)
                state.tests[nodeid] = TestInfo(
                    nodeid, str(event["model"]), folder, test["phase"], test["perf"], test["device"]
                )

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """How many tests were taken out, and why; `pytest_terminal_summary`."""
        for reason, count in Counter(self._deselected.values()).items():
            terminalreporter.write_line(f"npu: {count} test(s) deselected: {reason}", yellow=True)


def _hang_limit(item: pytest.Item, mark: pytest.Mark) -> float:
    seconds: Any = mark.args[0] if mark.args else mark.kwargs.get("seconds")
    if not isinstance(seconds, (int, float)) or seconds < 0:
        raise pytest.UsageError(f"{item.nodeid}: npu_hang_timeout needs a number of seconds, not {seconds!r}")
    return float(seconds)
