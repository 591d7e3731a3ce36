"""Who measures a configuration: the twin (modelled) or silicon. A sweep only sees this interface.

Kernels on silicon are run by a package that offers the entry point `silicon` of the group `npu_kernel_bench`:
a function of the folder with compiled kernels (or None) that returns a `Measurer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernel_registry.shapes import BENCHES
from npu_twin.extensions import ExtensionMissing, extension, kernel_references

if TYPE_CHECKING:
    from npu_twin.constraints import Config as Config  # for benches, which need no other name of the twin

CORRUPT_ABOVE = 0.1
"""mean_rel_L1 above which numbers are wrong rather than imprecise: the worst published row that is right has
0.048, the least wrong of the corrupt ones 0.46.
"""


class MeasurementUnavailable(RuntimeError):
    """A configuration cannot be measured here. The message says what is missing and how to get it."""


@dataclass(frozen=True)
class Numerics:
    """Error figures of one run over the whole output, and the gate they were held against."""

    figures: Mapping[str, float]
    tolerance: Mapping[str, float]
    elements_over: int

    @property
    def status(self) -> str:
        """``pass``, ``in_tier`` (imprecise elements near zero) or ``silent_corruption``."""
        mean = self.figures.get("mean_rel_L1", math.inf)
        if mean > CORRUPT_ABOVE:
            return "silent_corruption"
        return "in_tier" if self.elements_over else "pass"


@dataclass(frozen=True)
class Timed:
    """Times of one configuration in microseconds: that of the kernel alone, which is the figure of a row,
    and what decides between configurations.
    """

    latency_us: float
    cost_us: float


class Measurer(Protocol):
    """Measures times and errors of one configuration."""

    provenance: str
    source: str
    shortlist: int
    """How many of the legal configurations are worth measuring; the cost model chooses them."""
    resolution: float
    """Relative difference of two latencies below which they count as equal."""
    resolution_us: float
    """The same as a difference in microseconds; the larger of the two counts."""

    def times(self, config: Config) -> Timed | None:
        """Times in microseconds; None when this configuration cannot be built here."""

    def numerics(self, config: Config) -> Numerics | None:
        """Errors over the whole output; None where it cannot be computed in reasonable time."""


def config_of(row: Mapping[str, Any]) -> Config:
    """The configuration of a registry row that names all of it."""
    from npu_twin.constraints import Config

    return Config(
        row["op"], row["method"], row["dims"], row["tile"], tuple(row["herd"]), row.get("attrs") or {}
    )


def harness_inputs(config: Config) -> dict[str, Any]:
    """The published inputs of a kernel, by operand name. Raises MeasurementUnavailable without references."""
    inputs: dict[str, Any] = _references().make_inputs(
        config.op, config.dims, method=config.method, tile=config.tile
    )
    return inputs


def judge(config: Config, inputs: Mapping[str, Any], output: Any) -> Numerics:
    """Hold an output against the plain fp32 reference. Raises MeasurementUnavailable without references."""
    kernels = _references()
    variant = {"dims": config.dims, "method": config.method, "attrs": config.attrs}
    reference = kernels.reference_output(config.op, inputs, **variant, out_dtype=output_dtype(config))
    gate = kernels.tolerance(config.op, config.method)
    metrics = kernels.compare(output, reference)
    over = kernels.offenders(output, reference, rtol=gate.rtol, atol=gate.atol)
    figures = {name: getattr(metrics, name) for name in ("mean_rel_L1", "rel_err_max", "abs_err_max")}
    if figures["rel_err_max"] >= 1:
        # A reference near zero decides it, and the order of summation of the BLAS decides the reference.
        del figures["rel_err_max"]
    finite = {k: v for k, v in figures.items() if math.isfinite(v)}
    return Numerics(finite, {"rtol": gate.rtol, "atol": gate.atol}, over.count)


def _references() -> Any:
    try:
        return kernel_references()
    except ExtensionMissing as error:
        raise MeasurementUnavailable(f"error figures (--no-numerics leaves them out): {error}") from None


def output_dtype(config: Config) -> str:
    """``f32`` for the GEMM without a cast, else ``bf16``."""
    return "f32" if config.op == "gemm" and config.method == "external" else "bf16"


class TwinMeasurer:
    """Latency from the twin's cost model, errors from its datapath with the harness inputs.

    The figure of a row is that of the kernel on its own, as silicon rows have it. What decides is the time
    inside a program, where every launch is loaded: that is where deployments run it, and there a small kernel
    on all 32 tiles is slower than on four.

    Numerics of launches above ``operation_limit`` operations are left out: they would take minutes.
    """

    provenance = "twin"
    source = "npu_twin, modelled"
    shortlist = 10**9
    resolution = 0.05
    resolution_us = 10.0
    """The cost model's own error: a few per cent, and 10 us for the smallest launches, none of which is
    published on fewer than eight cores.
    """

    def __init__(self, operation_limit: float = 2e10) -> None:
        self.operation_limit = operation_limit

    def times(self, config: Config) -> Timed:
        """Modelled times of a run of this kernel alone, and of one launch inside a program, which decides."""
        from npu_twin import timing

        return Timed(timing.standalone_us(config), timing.launch_us(config))

    def numerics(self, config: Config) -> Numerics | None:
        """Errors of the twin's datapath."""
        if operations(config.op, config.dims) > self.operation_limit:
            return None
        from npu_twin.datapath import run_launch, standalone_launch

        inputs = harness_inputs(config)
        built: dict[str, Any] = {
            "method": config.method,
            "tile": config.tile,
            "attrs": config.attrs,
            "herd": config.herd,
        }
        launch = standalone_launch(config.op, config.dims, **built)
        return judge(config, inputs, run_launch(launch, inputs)["out"])


def silicon(artefacts: Path | None) -> Measurer:
    """Measurer on the NPU2 of this machine, with compiled kernels from the folder ``artefacts``.

    Raises MeasurementUnavailable when the toolkit, the driver, the device or the folder is missing.
    """
    try:
        measurer: Measurer = extension(BENCHES, "silicon")(artefacts)
    except ExtensionMissing as error:
        raise MeasurementUnavailable(f"--npu: {error}") from None
    return measurer


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
        return 4.0 * d["lq"] * d["lk"] * d["head_dim"] * d["q_heads"]
    return 30.0 * math.prod(d.values())
