"""The fixture `npu_benchmark`, and hooks of pytest-benchmark that it calls before the collection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_npu.core.constants import AWAKE
from pytest_npu.core.models import reaches_models

if TYPE_CHECKING:
    from pytest_npu.bridges.benchmark import NpuBenchmark
    from pytest_npu.device.driver import Device


class WithBenchmark:
    """The fixture when pytest-benchmark is there."""

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
        if not config.pluginmanager.has_plugin(AWAKE) and not reaches_models(config):
            return
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
            from pytest_npu.bridges.benchmark import compare_machines

            compare_machines(config, saved)


class WithoutBenchmark:
    """The fixture when pytest-benchmark is missing."""

    @pytest.fixture
    def npu_benchmark(self) -> NpuBenchmark:
        """Fail with the remedy."""
        pytest.fail("npu_benchmark needs pytest-benchmark: pip install pytest-benchmark", pytrace=False)


def is_present(config: pytest.Config) -> bool:
    """True when pytest-benchmark is loaded, under whatever name."""
    return hasattr(config.hook, "pytest_benchmark_generate_json")


def register(config: pytest.Config) -> None:
    """Register the fixture that fits what is installed."""
    present = is_present(config)
    config.pluginmanager.register(WithBenchmark() if present else WithoutBenchmark(), "npu-benchmark")
