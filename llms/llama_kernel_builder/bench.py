"""One kernel alone: for phase 1, by the ability `kernel_bench`, and for sweeps of the registry.

Nothing here judges. What a kernel must compute and how exact it must be is the gate's, or the registry's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_registry.measure import (
    MeasurementUnavailable,
    Numerics,
    Timed,
    harness_inputs,
    judge,
    output_dtype,
)
from kernel_registry.registry_lookup import UnmeasuredShape
from kernel_registry.shapes import Request, RequestError
from llms.verify.contract.kernel_case import KernelCase, RegistryRow

from . import driver
from .cache import KernelCache
from .deployment.session import artefact_folder
from .exceptions import ArtefactMissing, ConfigError, ToolkitError
from .generic import generic_sequence
from .kernels import Requirement, recording
from .llama_loop import KernelSequence, buckets_of, required_kernels
from .model_config import ModelConfig
from .program import Program, leaf_program
from .specs import KernelSpec, Scalar
from .toolchains.seam import PrebuiltToolchain, Toolchain, toolchain_for

if TYPE_CHECKING:
    from kernel_registry.measure import Config

Array = np.ndarray[Any, Any]

WARM_UP_RUNS = 10
TIMED_RUNS = 20
"""Counts of the published harness (Xilinx/mlir-air e972f2942, programming_examples/*/run.py)."""


class LoneKernel:
    """One kernel in a program of its own, by the same cache and driver as a deployment's.

    Compiles at once; the device is opened by the first run and released at the end of a `with`. Raises
    CompileFailed, ArtefactMissing.
    """

    def __init__(self, spec: KernelSpec, folder: Path, device: driver.Driver, toolchain: Toolchain) -> None:
        self.program = leaf_program(spec.symbol, spec)
        self.cache = KernelCache(folder, driver=device, toolchain=toolchain)
        self.cache.compile_and_cache(self.program)

    def run(self, inputs: Mapping[str, Array]) -> Array:
        """The output of one launch; `inputs` by operand name. Raises KernelRunError."""
        arrays = [inputs.get(buffer.name) for buffer in self.program.buffers]
        return self.cache.load_and_run(self.program.name, *arrays)[self.program.index["out"]]

    def mean_run_us(self, inputs: Mapping[str, Array]) -> float:
        """Mean time of a run after the warm-up, in microseconds of the device clock."""
        for _ in range(WARM_UP_RUNS):
            self.run(inputs)
        self.cache.profiler.enabled = True
        for _ in range(TIMED_RUNS):
            self.run(inputs)
        (entry,) = (e for (_, kind, _), e in self.cache.profiler.entries.items() if kind == "elf")
        return entry.total_s / entry.calls * 1e6

    def __enter__(self) -> LoneKernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()


def case_of(model: str, need: Requirement, attrs: Mapping[str, Scalar], prompt_len: int = 0) -> KernelCase:
    """A kernel as the registry configures it; `attrs` are what no row has, such as the eps of a norm."""
    sizes = tuple(need.dims.items())
    try:
        config = need.config()
    except UnmeasuredShape as error:
        return KernelCase(model, need.op, sizes, prompt_len=prompt_len, unavailable=str(error))
    spec = need.spec(config, attrs)
    return KernelCase(
        model,
        need.op,
        sizes,
        spec.method,
        spec.tile,
        spec.herd,
        spec.attrs,
        spec.dtype_out,
        prompt_len,
        RegistryRow(config.row_id, config.provenance, config.used_by),
        command=f"python -m kernel_registry sweep {need.op} {'x'.join(map(str, need.shape))}"
        f"{' --causal' if need.causal else ''} --if-missing --used-by {model}",
    )


def spec_of(case: KernelCase) -> KernelSpec:
    """The kernel of a case. Raises ToolkitError for a case without a configuration."""
    if case.unavailable:
        raise ToolkitError(f"{case}: {case.unavailable}")
    tile, attrs = dict(case.tile), dict(case.attrs)
    return KernelSpec.make(case.op, case.dims, case.method, tile, case.herd, attrs, dtype_out=case.dtype_out)


def program_of(case: KernelCase) -> Program:
    """The ELF that launches the kernel of a case alone. Raises ToolkitError as `spec_of`."""
    spec = spec_of(case)
    return leaf_program(spec.symbol, spec)


class ModelBench:
    """`KernelBench` of one configuration of a model, on the current device (see `driver`)."""

    def __init__(self, model: str, sequence: KernelSequence, config: ModelConfig) -> None:
        self.model = model
        self._sequence = sequence
        self._config = config

    def cases(self) -> tuple[KernelCase, ...]:
        """Every kernel that prefill, decode and the LM head launch, each once, the shortest prompts first."""
        first: dict[tuple[Requirement, tuple[tuple[str, Scalar], ...]], int] = {}
        lengths = buckets_of(self._config)
        for prompt_len in (*lengths, 0):
            for launched in self._launched(prompt_len):
                first[launched] = min(prompt_len, first.get(launched, prompt_len))
        return tuple(case_of(self.model, need, dict(attrs), at) for (need, attrs), at in first.items())

    def _launched(self, prompt_len: int) -> Iterator[tuple[Requirement, tuple[tuple[str, Scalar], ...]]]:
        """Kernels of prefill at a length (0: of decode), with the attributes that no registry row has."""
        with recording() as needs:
            if prompt_len:
                blocks = [*self._sequence.prefill_blocks(self._config, prompt_len)]
            else:
                blocks = [*self._sequence.decode_blocks(self._config), self._sequence.lm_head(self._config)]
        specs = [step.spec for block in blocks for step in block.steps]
        for need in needs:
            same = (spec.attrs for spec in specs if spec.op == need.op and dict(spec.dims) == need.dims)
            yield from ((need, attrs) for attrs in dict.fromkeys(same) or [()])

    def prepare(self, case: KernelCase) -> None:
        """Compile the kernel. Raises CompileFailed, ArtefactMissing."""
        with self._lone(case):
            pass

    def run(self, case: KernelCase, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One launch on fresh buffers; `out` is the output. Raises KernelRunError and as `prepare`."""
        with self._lone(case) as kernel:
            return {"out": kernel.run(inputs)}

    def _lone(self, case: KernelCase) -> LoneKernel:
        device = driver.current()
        folder = artefact_folder(self.model) / "kernels"
        return LoneKernel(spec_of(case), folder, device, toolchain_for(device.name, self.model))


class SiliconMeasurer:
    """Times and checks configurations for a sweep, each in a program of its own.

    A configuration that the toolchain has no artefact for is left out of the sweep.
    """

    provenance = "measured-silicon"
    shortlist = 16
    resolution = 0.01
    resolution_us = 0.5

    def __init__(self, device: driver.Driver, toolchain: Toolchain) -> None:
        self.source = f"{device.label}, {toolchain.identity}"
        self._device = device
        self._toolchain = toolchain
        self._folder = tempfile.TemporaryDirectory(prefix="kernel_registry_")

    def times(self, config: Config) -> Timed | None:
        """The measured latency, which decides too: a launch inside a program cannot be timed on silicon."""
        try:
            with self._lone(config) as kernel:
                latency = kernel.mean_run_us(harness_inputs(config))
        except ArtefactMissing:
            return None
        return Timed(latency, latency)

    def numerics(self, config: Config) -> Numerics:
        """Errors of the first run on fresh buffers: FlashAttention keeps state in its output."""
        inputs = harness_inputs(config)
        with self._lone(config) as kernel:
            return judge(config, inputs, kernel.run(inputs))

    def _lone(self, config: Config) -> LoneKernel:
        spec = KernelSpec.make(
            config.op,
            config.dims,
            config.method,
            config.tile,
            config.herd,
            config.attrs,
            dtype_out=output_dtype(config),
        )
        return LoneKernel(spec, Path(self._folder.name), self._device, self._toolchain)


def cases(config: Mapping[str, Any], buckets: Sequence[int]) -> list[Request]:
    """What a sweep of the registry needs for a model's config.json: every kernel of prefill at these lengths
    and of decode. Raises RequestError naming what the configuration lacks.
    """
    try:
        needs = required_kernels(generic_sequence(), ModelConfig.from_hf_dict(config), buckets)
    except ConfigError as error:
        raise RequestError(str(error)) from error
    return [Request(n.op, n.shape, n.precision, n.output_dtype, n.causal) for n in needs]


def silicon(artefacts: Path | None) -> SiliconMeasurer:
    """Measurer on the NPU2 of this machine, with compiled kernels from the folder `artefacts`.

    Raises MeasurementUnavailable when the driver, the device or the folder is missing.
    """
    try:
        device = driver.select(driver.NPU2)
        if artefacts is None:
            raise MeasurementUnavailable(
                "--npu needs compiled kernels: --artefacts DIR, a folder with a manifest.json that the "
                "mlir-air toolchain built for this registry's programs"
            )
        return SiliconMeasurer(device, PrebuiltToolchain(artefacts))
    except ToolkitError as error:
        raise MeasurementUnavailable(f"--npu: {error}") from error
