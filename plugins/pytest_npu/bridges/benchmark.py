"""pytest-benchmark on the device clock.

Its own statistics, storage, compare and compare-fail then work on device times. Only `pedantic` mode is
used: calibration loops never end on a clock that moves only when the device works.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

import pytest

from pytest_npu.bridges import benchmark_session, has_benchmark
from pytest_npu.core.constants import (
    DEVICE_LABELS,
    DRIVER_TIMEOUT_S,
    DRIVER_TIMEOUT_TOLERANCE_S,
    NPU2,
    ROUNDS,
)
from pytest_npu.core.events import Event, to_jsonable
from pytest_npu.core.models import model_name
from pytest_npu.core.state import NpuState, Role, state_of
from pytest_npu.device.driver import Device
from pytest_npu.device.preflight.feature import run_preflight

XDIST_REASON = (
    "performance tests do not run under pytest-xdist (-n): parallel runs disturb each other's times"
)


class NpuBenchmark:
    """Measures a function on the device clock; one measurement per test.

    ``npu_benchmark(run, args=(tokens,), rounds=20, seq_len=256, breakdown=rows)`` returns what `run` returned
    last. `breakdown` is a value or a function called after the last round; it and further keyword arguments
    go to pytest-benchmark's `extra_info` and to the report. ``metric="ttft"`` or ``metric="tpot"``
    says what is measured; without it the name of the test tells.
    """

    def __init__(self, request: pytest.FixtureRequest, device: Device, benchmark: Any) -> None:
        self._request = request
        self._device = device
        self._benchmark = benchmark
        self._times: list[float] = []
        self.extra_info: dict[str, Any] = benchmark.extra_info if benchmark is not None else {}

    def __call__(
        self,
        target: Callable[..., Any],
        *,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        setup: Callable[[], Any] | None = None,
        rounds: int | None = None,
        warmup_rounds: int | None = None,
        seq_len: int | None = None,
        breakdown: Any = None,
        **extra: Any,
    ) -> Any:
        """Measure `target`. Fails the test when the device clock did not move."""
        warmup_default, rounds_default = ROUNDS[self._device.name]
        rounds = rounds_default if rounds is None else rounds
        warmup_rounds = warmup_default if warmup_rounds is None else warmup_rounds
        result = self._benchmark.pedantic(
            self._timed(target),
            args=args,
            kwargs=dict(kwargs or {}),
            setup=setup,
            rounds=rounds,
            warmup_rounds=warmup_rounds,
            iterations=1,
        )
        times = self._times[-rounds:]
        if not times or min(times) <= 0.0:
            pytest.fail(
                f"the device clock ({self._device.label}) did not move during the measurement: "
                "the measured function did no work on the device",
                pytrace=False,
            )
        if self._device.name == NPU2:
            self._refuse_timeouts(times)
        self._record(times, warmup_rounds, seq_len, breakdown, extra)
        return result

    def _refuse_timeouts(self, times: list[float]) -> None:
        """A run that took as long as the driver's time-out was aborted by it: it failed, it is not slow."""
        aborted = [time for time in times if abs(time - DRIVER_TIMEOUT_S) <= DRIVER_TIMEOUT_TOLERANCE_S]
        if aborted:
            pytest.fail(
                f"{len(aborted)} of {len(times)} rounds took {aborted[0]:.2f} s, the driver's time-out "
                f"(about {DRIVER_TIMEOUT_S} s): the device hung and was reset, this is no measurement",
                pytrace=False,
            )

    def _timed(self, target: Callable[..., Any]) -> Callable[..., Any]:
        clock = self._device.clock

        def run(*args: Any, **kwargs: Any) -> Any:
            start = clock.now()
            result = target(*args, **kwargs)
            self._times.append(clock.now() - start)
            return result

        run.__name__ = getattr(target, "__name__", "target")
        return run

    def _record(
        self, times: list[float], warmup: int, seq_len: int | None, breakdown: Any, extra: Mapping[str, Any]
    ) -> None:
        import statistics

        state = state_of(self._request.config)
        node = self._request.node
        info = state.tests.get(node.nodeid)
        model = info.model if info else model_name(None)
        hooks: BenchmarkHooks = state.config.pluginmanager.getplugin("npu-measurements")
        details = {
            "device": self._device.label,
            "checkpoint": hooks.checkpoints.get(model),
            "seq_len": seq_len,
            "breakdown": breakdown() if callable(breakdown) else breakdown,
            **extra,
        }
        plain = to_jsonable(details, "benchmark")
        self.extra_info.update(plain)
        payload = {
            "name": node.name,
            "unit": "s",
            "rounds": len(times),
            "warmup_rounds": warmup,
            "min": min(times),
            "median": statistics.median(times),
            "mean": statistics.fmean(times),
            "max": max(times),
            "stddev": statistics.stdev(times) if len(times) > 1 else 0.0,
            "disabled": bool(getattr(self._benchmark, "disabled", False)),
            **plain,
        }
        state.emit("record", model=model, nodeid=node.nodeid, kind="benchmark", payload=payload)


def machine_fields(state: NpuState) -> dict[str, Any]:
    """What must agree before two benchmarks may be compared."""
    return {"device": DEVICE_LABELS[state.device.name], **state.device.identity}


def compare_machines(state: NpuState, saved: Mapping[str, Any]) -> None:
    """Raise pytest.UsageError when the saved times come from another device, driver or power mode."""
    if not state.device.identity:
        run_preflight(state.config, state.device)
    here = machine_fields(state)
    different = [
        f"{key}: {saved.get(key)} then, {here.get(key)} now"
        for key in sorted({*here, *saved})
        if here.get(key) != saved.get(key)
    ]
    if different:
        raise pytest.UsageError(
            "--benchmark-compare: the saved benchmark comes from another device: "
            + "; ".join(different)
            + ". Such times cannot be compared; choose a run of the same device (pytest-benchmark list)"
        )


def use_device_clock(item: pytest.Item, state: NpuState) -> None:
    """Make the device clock the timer of pytest-benchmark for one test, unless the test names another."""
    if not has_benchmark(state.config):
        return

    def device_clock_seconds() -> float:
        return state.device.now()

    closest = item.get_closest_marker("benchmark")
    settings = {"timer": device_clock_seconds, **(closest.kwargs if closest is not None else {})}
    item.add_marker(pytest.mark.benchmark(**settings), append=False)


class BenchmarkHooks:
    """Performance tests have to measure something, and a regression fails the run; owns what was measured."""

    def __init__(self, state: NpuState) -> None:
        self._state = state
        self._measured: set[str] = set()
        #: Label of the weights by model, of the deployments that were opened.
        self.checkpoints: dict[str, str | None] = {}

    def pytest_npu_event(self, event: Event) -> None:
        """Remember measurements and the weights they are of; `pytest_npu_event`."""
        if event["event"] == "record" and event["kind"] == "benchmark":
            self._measured.add(event["nodeid"])
        elif event["event"] == "deployment":
            self.checkpoints[str(event["model"])] = (event["checkpoint"] or {}).get("label")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Fail a performance test that passed without a measurement; `pytest_runtest_makereport`."""
        report = yield
        info = self._state.tests.get(item.nodeid)
        unmeasured = info is not None and info.perf and item.nodeid not in self._measured
        if unmeasured and report.when == "call" and report.passed:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} is a performance test (it uses npu_benchmark) but measured nothing: "
                "call npu_benchmark(function) or drop the fixture"
            )
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Log what became slower before the reports are written; `pytest_sessionfinish`."""
        state = self._state
        if state.role is not Role.WORKER:
            for nodeid, reason in benchmark_session.regressions(state.config):
                info = state.tests.get(nodeid)
                if info is not None:
                    fields = {"nodeid": nodeid, "phase": info.phase, "reason": reason}
                    state.emit("regression", model=info.model, **fields)
                if session.exitstatus == pytest.ExitCode.OK:
                    session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)
