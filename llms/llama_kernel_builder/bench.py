"""Who measures a configuration: the twin (modelled) or silicon. A sweep only sees this interface."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llms.verify.reference.kernels import compare, make_inputs, offenders, reference_output, tolerance

if TYPE_CHECKING:
    from llms.llama_kernel_builder.cache import KernelCache
    from npu_twin.constraints import Config

WARM_UP_RUNS = 10
TIMED_RUNS = 20
"""Counts of the published harness (Xilinx/mlir-air e972f2942, programming_examples/*/run.py)."""
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


def judge(config: Config, inputs: Mapping[str, Any], output: Any, dtype_out: str) -> Numerics:
    """Hold an output against the plain fp32 reference of the harness."""
    reference = reference_output(
        config.op, inputs, dims=config.dims, method=config.method, attrs=config.attrs, out_dtype=dtype_out
    )
    gate = tolerance(config.op, config.method)
    metrics = compare(output, reference)
    over = offenders(output, reference, rtol=gate.rtol, atol=gate.atol)
    figures = {
        "mean_rel_L1": metrics.mean_rel_L1,
        "rel_err_max": metrics.rel_err_max,
        "abs_err_max": metrics.abs_err_max,
    }
    if figures["rel_err_max"] >= 1:
        # A reference near zero decides it, and the order of summation of the BLAS decides the reference.
        del figures["rel_err_max"]
    finite = {k: v for k, v in figures.items() if math.isfinite(v)}
    return Numerics(finite, {"rtol": gate.rtol, "atol": gate.atol}, over.count)


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

    def latency_us(self, config: Config) -> float:
        """Modelled time in microseconds of a run that consists of this kernel alone."""
        from npu_twin import timing

        return float(timing.standalone_us(config))

    def times(self, config: Config) -> Timed:
        """Modelled times; what decides is that of one launch inside a program."""
        from npu_twin import timing

        return Timed(self.latency_us(config), float(timing.launch_us(config)))

    def numerics(self, config: Config) -> Numerics | None:
        """Errors of the twin's datapath."""
        if operations(config.op, config.dims) > self.operation_limit:
            return None
        from npu_twin.datapath import run_launch
        from npu_twin.listing import Launch, Operand
        from npu_twin.opset import OPS

        inputs = make_inputs(config.op, config.dims, method=config.method, tile=config.tile)
        names = OPS[config.op].signature(config.dims, config.method, config.tile)
        launch = Launch(
            config.op,
            config.op,
            config.dims,
            {name: Operand(name) for name in names},
            config.method,
            config.attrs,
            config.tile,
            config.herd,
        )
        return judge(config, inputs, run_launch(launch, inputs)["out"], output_dtype(config))


class ToolkitMeasurer:
    """Times and checks launches through the host toolkit, each in a program of its own.

    ``driver`` and ``toolchain`` are those of ``llms.llama_kernel_builder``. A configuration that the
    toolchain has no artefact for is left out of the sweep.
    """

    provenance = "measured-silicon"
    shortlist = 16
    resolution = 0.01
    resolution_us = 0.5

    def __init__(self, driver: Any, toolchain: Any) -> None:
        self.source = f"{driver.label}, {toolchain.identity}"
        self._driver = driver
        self._toolchain = toolchain
        self._folder = tempfile.TemporaryDirectory(prefix="kernel_registry_")

    def latency_us(self, config: Config) -> float | None:
        """Mean time of one run over the timed runs, after the warm-up, in microseconds."""
        from llms.llama_kernel_builder.exceptions import ArtefactMissing

        cache = self._cache()
        try:
            try:
                arrays = self._arrays(cache, config)
            except ArtefactMissing:
                return None
            for _ in range(WARM_UP_RUNS):
                cache.load_and_run(config.op, *arrays)
            cache.profiler.enabled = True
            for _ in range(TIMED_RUNS):
                cache.load_and_run(config.op, *arrays)
            (entry,) = (e for (_, kind, _), e in cache.profiler.entries.items() if kind == "elf")
            return entry.total_s / entry.calls * 1e6
        finally:
            cache.close()

    def times(self, config: Config) -> Timed | None:
        """The measured latency, which decides too: a launch inside a program cannot be timed on silicon."""
        latency = self.latency_us(config)
        return None if latency is None else Timed(latency, latency)

    def numerics(self, config: Config) -> Numerics | None:
        """Errors of the first run on fresh buffers: FlashAttention keeps state in its output."""
        cache = self._cache()
        try:
            inputs = make_inputs(config.op, config.dims, method=config.method, tile=config.tile)
            arrays = self._arrays(cache, config)
            outputs = cache.load_and_run(config.op, *arrays)
            output = outputs[cache.program(config.op).index["out"]]
            return judge(config, inputs, output, output_dtype(config))
        finally:
            cache.close()

    def _cache(self) -> KernelCache:
        from llms.llama_kernel_builder.cache import KernelCache

        return KernelCache(Path(self._folder.name), toolchain=self._toolchain, driver=self._driver)

    def _arrays(self, cache: KernelCache, config: Config) -> list[Any]:
        from llms.llama_kernel_builder.program import leaf_program
        from llms.llama_kernel_builder.specs import KernelSpec

        spec = KernelSpec.make(
            config.op,
            config.dims,
            config.method,
            config.tile,
            config.herd,
            config.attrs,
            dtype_out=output_dtype(config),
        )
        program = leaf_program(config.op, spec)
        cache.compile_and_cache(program)
        inputs = make_inputs(config.op, config.dims, method=config.method, tile=config.tile)
        return [inputs.get(buffer.name) for buffer in program.buffers]


def silicon(artefacts: Path | None) -> ToolkitMeasurer:
    """Measurer on the NPU2 of this machine, with compiled kernels from the folder ``artefacts``.

    Raises MeasurementUnavailable when the toolkit, the driver, the device or the folder is missing.
    """
    try:
        from llms.llama_kernel_builder import driver
        from llms.llama_kernel_builder.exceptions import ToolkitError
        from llms.llama_kernel_builder.toolchains.seam import PrebuiltToolchain
    except ImportError as error:
        raise MeasurementUnavailable(
            f"--npu needs the host toolkit llms.llama_kernel_builder: {error}"
        ) from error
    try:
        device = driver.select(driver.NPU2)
        if artefacts is None:
            raise MeasurementUnavailable(
                "--npu needs compiled kernels: --artefacts DIR, a folder with a manifest.json that the "
                "mlir-air toolchain built for this registry's programs"
            )
        return ToolkitMeasurer(device, PrebuiltToolchain(artefacts))
    except ToolkitError as error:
        raise MeasurementUnavailable(f"--npu: {error}") from error


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
