"""The fixture `npu_benchmark`, and hooks of pytest-benchmark that it calls before the collection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_npu.bridges import has_benchmark
from pytest_npu.core.constants import COLLECTION
from pytest_npu.core.models import reaches_models

if TYPE_CHECKING:
    from pytest_npu.bridges.benchmark import NpuBenchmark
    from pytest_npu.device.driver import Device


class WithBenchmark:
    """The fixture when pytest-benchmark is there.

    `wake` makes the plugin take part: pytest-benchmark asks for the machine before there is a test of ours.
    """

    def __init__(self, wake: Callable[[pytest.Config], object]) -> None:
        self._wake = wake

    @pytest.fixture
    def npu_benchmark(
        self, request: pytest.FixtureRequest, npu_device: Device, benchmark: Any
    ) -> NpuBenchmark:
        """Measure a function with pytest-benchmark on the device clock; see `NpuBenchmark`."""
        from pytest_npu.bridges.benchmark import NpuBenchmark

        return NpuBenchmark(request, npu_device, benchmark)

    def pytest_benchmark_update_machine_info(
        self, config: pytest.Config, machine_info: dict[str, Any]
    ) -> None:
        """Name the device in saved benchmarks; `pytest_benchmark_update_machine_info`."""
        if not config.pluginmanager.has_plugin(COLLECTION) and not reaches_models(config):
            return
        self._wake(config)
        from pytest_npu.bridges.benchmark import machine_fields
        from pytest_npu.core.state import state_of

        state = state_of(config)
        if state.active or state.is_expected():
            machine_info["npu"] = machine_fields(state)

    def pytest_benchmark_compare_machine_info(
        self, config: pytest.Config, compared_benchmark: dict[str, Any]
    ) -> None:
        """Refuse to compare times of different devices; `pytest_benchmark_compare_machine_info`."""
        saved = compared_benchmark.get("machine_info", {}).get("npu")
        if saved is not None:
            self._wake(config)
            from pytest_npu.bridges.benchmark import compare_machines
            from pytest_npu.core.state import state_of

            compare_machines(state_of(config), saved)


class WithoutBenchmark:
    """The fixture when pytest-benchmark is missing."""

    @pytest.fixture
    def npu_benchmark(self) -> NpuBenchmark:
        """Fail with the remedy."""
        pytest.fail("npu_benchmark needs pytest-benchmark: pip install pytest-benchmark", pytrace=False)


def register(config: pytest.Config, wake: Callable[[pytest.Config], object]) -> None:
    """Register the fixture that fits what is installed."""
    fixture = WithBenchmark(wake) if has_benchmark(config) else WithoutBenchmark()
    config.pluginmanager.register(fixture, "npu-benchmark")
