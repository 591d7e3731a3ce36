"""Run blocks by name: one ELF per block (merged) or one per kernel (unmerged)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .block import Block
from .cache import KernelCache
from .exceptions import UnknownKernel
from .host_ops import host_op
from .layer import Layer, Stage
from .program import Program

Array = np.ndarray[Any, Any]


class BlockRunner:
    """Blocks of one phase (prefill or decode) on a kernel cache.

    Usage: ``runner("flash_attn", layer, q=..., k=..., v=...)["attn"]``; a model's layer functions get a
    `LayerRun` over it. Unmerged, every kernel is an ELF of its own and every intermediate visits the host:
    slower, and the yardstick that merging is measured against. Weights of a layer are one buffer, whatever
    form and bucket reads them.

    layers: what `add_layer` was given, by the suffix of the ELFs' names.
    """

    def __init__(self, cache: KernelCache, *, merged: bool = True) -> None:
        self.cache = cache
        self.merged = merged
        self._programs: dict[str, tuple[Program, ...]] = {}
        self._blocks: dict[str, Block] = {}
        self.layers: dict[str, Layer] = {}

    def add(self, name: str, block: Block) -> None:
        """Compile a block under a name (idempotent for an equal block)."""
        programs = (block.merged(),) if self.merged else block.unmerged()
        for program in programs:
            self.cache.compile_and_cache(program)
        self._programs[name] = programs
        self._blocks[name] = block

    def add_layer(self, suffix: str, layer: Layer) -> None:
        """Compile the ELFs of a layer, their names with `suffix`."""
        named = layer.map(lambda block: block.named(suffix))
        for block in named:
            self.add(block.name, block)
        self.layers[suffix] = named

    def layer(self, suffix: str) -> Layer:
        """What `add_layer` was given under this suffix. Raises UnknownKernel."""
        try:
            return self.layers[suffix]
        except KeyError:
            known = ", ".join(map(repr, self.layers)) or "none"
            raise UnknownKernel(f"no layer '{suffix}' was added to this runner; known: {known}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._programs

    def static_names(self, name: str) -> tuple[str, ...]:
        """Static arguments of a block, in order."""
        programs = self._get(name)
        return tuple(dict.fromkeys(b.name for p in programs for b in p.buffers if b.role == "static"))

    def run(self, stage: Stage, layer: int, **values: Array) -> tuple[Array, ...]:
        """Run the ELFs of a stage in order, outputs into inputs of the same name; returns its outputs."""
        for block in stage.blocks:
            values |= self(block.name, layer, **{name: values[name] for name in block.arguments("input")})
        return tuple(values[name] for name in stage.outputs)

    def preload(self, name: str, layer: int, static: Mapping[str, Array], pools: Mapping[str, str]) -> None:
        """Write static arguments of one layer. `pools` names the shared buffer of each argument."""
        for program in self._get(name):
            arrays = {b.name: static[b.name] for b in program.buffers if b.role == "static"}
            shared = {key: pools[key] for key in arrays if key in pools}
            self.cache.preload(program.name, f"{program.name}_L{layer}", arrays, shared=shared)

    def __call__(self, name: str, layer: int, **inputs: Array) -> dict[str, Array]:
        """Run a block for one layer; returns copies of its outputs by name."""
        programs = self._get(name)
        block = self._blocks[name]
        if block.pack is None or block.unpack is None:
            return self._run(name, programs, layer, inputs)
        profiler = self.cache.profiler
        nbytes = 2 * sum(array.nbytes for array in inputs.values())
        with host_op(profiler, "head_first_transpose", nbytes=nbytes):
            packed = block.pack(inputs)
        outputs = self._run(name, programs, layer, packed)
        with host_op(profiler, "head_first_transpose", nbytes=2 * sum(a.nbytes for a in outputs.values())):
            return block.unpack(outputs)

    def _run(
        self, name: str, programs: tuple[Program, ...], layer: int, inputs: dict[str, Array]
    ) -> dict[str, Array]:
        if len(programs) == 1:
            return self.run_program(programs[0], layer, inputs)
        values = dict(inputs)
        for program in programs:
            given = {b.name: values[b.name] for b in program.buffers if b.role == "input"}
            values |= self.run_program(program, layer, given)
        return {key: values[key] for key in self._blocks[name].arguments("output")}

    def run_program(self, program: Program, layer: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one ELF for one layer; returns its outputs by name."""
        return self.cache.run(program.name, f"{program.name}_L{layer}", **inputs)

    def _get(self, name: str) -> tuple[Program, ...]:
        try:
            return self._programs[name]
        except KeyError:
            known = ", ".join(self._programs) or "none"
            raise UnknownKernel(f"block '{name}' was not added to this runner; known: {known}") from None
