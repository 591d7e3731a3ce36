"""Who measures a configuration: the twin (modelled) or silicon. A sweep only sees this interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from npu_twin.constraints import Config


class MeasurementUnavailable(RuntimeError):
    """A configuration cannot be measured here. The message says what is missing and how to get it."""


@dataclass(frozen=True)
class Numerics:
    """Error figures of one run against the fp32 reference, and the tolerance they were held against."""

    figures: Mapping[str, float | int]
    tolerance: Mapping[str, float]
    elements_over: int = 0
    note: str = field(default="")


class Measurer(Protocol):
    """Measures latency in microseconds and errors of one configuration."""

    provenance: str
    source: str
    shortlist: int
    """How many of the legal configurations are worth measuring; the rest are left out by the cost model."""

    def latency_us(self, config: Config) -> float:
        """Time of one launch in microseconds."""

    def numerics(self, config: Config) -> Numerics | None:
        """Errors over the whole output; None where it cannot be computed in reasonable time."""


class TwinMeasurer:
    """Latency from the twin's cost model, errors from its datapath with the harness inputs."""

    provenance = "twin"
    source = "npu_twin, modelled"
    shortlist = 10**9

    def __init__(self, flop_limit: float = 2e10) -> None:
        self.flop_limit = flop_limit

    def latency_us(self, config: Config) -> float:
        """Modelled time of one launch in microseconds."""
        from npu_twin import timing

        return float(timing.launch_us(config))

    def numerics(self, config: Config) -> Numerics | None:
        """Errors of the twin's datapath; None above ``flop_limit`` operations."""
        if operations(config.op, config.dims) > self.flop_limit:
            return None
        from kernel_registry._numerics import twin_numerics

        return twin_numerics(config)


class SiliconMeasurer:
    """Times and checks launches on an NPU2 through the host toolkit.

    Raises MeasurementUnavailable when the driver, the device or a toolchain that builds for it is missing.
    """

    provenance = "measured-silicon"
    source = "npu2, measured"
    shortlist = 8

    def __init__(self) -> None:
        try:
            from llms.llama_kernel_builder import driver
        except ImportError as error:
            raise MeasurementUnavailable(
                f"--npu needs the host toolkit llms.llama_kernel_builder: {error}"
            ) from error
        try:
            self._driver = driver.select("npu2")
        except Exception as error:
            raise MeasurementUnavailable(f"--npu: {error}") from error

    def latency_us(self, config: Config) -> float:
        """Mean time of one launch over the timed runs, in microseconds."""
        return self._bench().latency_us(config)

    def numerics(self, config: Config) -> Numerics | None:
        """Errors of one run on the device."""
        return self._bench().numerics(config)

    def _bench(self) -> Any:
        raise MeasurementUnavailable("no toolchain here builds single kernels for silicon")


def operations(op: str, dims: Mapping[str, int]) -> float:
    """Rough count of arithmetic operations, to keep the twin's numerics in reasonable time."""
    d = dims
    if op == "gemm":
        return 2.0 * d["M"] * d["K"] * d["N"]
    if op in ("gemv", "gemv_add"):
        return 2.0 * d["M"] * d["K"]
    if op == "norm_gateup_swiglu":
        return 4.0 * d["emb"] * d["hidden"]
    if op == "flash_attention":
        return 40.0 * d["lq"] * d["lk"] * d["head_dim"] * d["q_heads"] / 10
    size = 1.0
    for value in d.values():
        size *= value
    return 30.0 * size
