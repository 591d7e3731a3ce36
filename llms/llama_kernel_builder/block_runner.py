"""Run blocks by name: one ELF per block (merged) or one per kernel (unmerged)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .block import Block
from .cache import KernelCache
from .exceptions import UnknownKernel
from .host_ops import host_op
from .program import Program

Array = np.ndarray[Any, Any]


class BlockRunner:
    """Blocks of one phase (prefill or decode) on a kernel cache.

    Usage: ``run("flash_attn", layer, q=..., k=..., v=...)["attn"]``. Unmerged, every kernel is an
    ELF of its own and every intermediate visits the host: slower, and the yardstick that merging is
    measured against. Weights of a layer are one buffer, whatever form and bucket reads them.
    """

    def __init__(self, cache: KernelCache, *, merged: bool = True) -> None:
        self.cache = cache
        self.merged = merged
        self._programs: dict[str, tuple[Program, ...]] = {}
        self._outputs: dict[str, tuple[str, ...]] = {}
        self._host: dict[str, Callable[..., dict[str, Array]]] = {}
        self._blocks: dict[str, Block] = {}
        self._inputs: dict[str, tuple[str, ...]] = {}

    def add(self, name: str, block: Block) -> None:
        """Compile a block under a name (idempotent for an equal block)."""
        programs = (block.merged(),) if self.merged else block.unmerged()
        for program in programs:
            self.cache.compile_and_cache(program)
        self._programs[name] = programs
        self._blocks[name] = block
        self._inputs[name] = tuple(buffer.name for buffer in block.buffers if buffer.role == "input")
        self._outputs[name] = tuple(buffer.name for buffer in block.buffers if buffer.role == "output")

    def add_host(self, name: str, compute: Callable[..., dict[str, Array]]) -> None:
        """Compute a block on the host instead: `compute(**inputs)` returns its outputs by name."""
        self._programs[name] = ()
        self._host[name] = compute

    def __contains__(self, name: str) -> bool:
        return name in self._programs

    def static_names(self, name: str) -> tuple[str, ...]:
        """Static arguments of a block, in order."""
        return tuple(
            dict.fromkeys(
                buffer.name
                for program in self._get(name)
                for buffer in program.buffers
                if buffer.role == "static"
            )
        )

    def chain(self, names: Sequence[str], layer: int, **values: Array) -> dict[str, Array]:
        """Run the blocks of `names` that were added, in order; outputs feed the inputs of the same name."""
        for name in names:
            if name in self:
                inputs = {key: values[key] for key in self._inputs[name]}
                values.update(self(name, layer, **inputs))
        return values

    def preload(self, name: str, layer: int, static: Mapping[str, Array], pools: Mapping[str, str]) -> None:
        """Write static arguments of one layer. `pools` names the shared buffer of each argument."""
        for program in self._get(name):
            mine = {b.name: static[b.name] for b in program.buffers if b.role == "static"}
            shared = {key: pools[key] for key in mine if key in pools}
            self.cache.preload(program.name, f"{program.name}_L{layer}", mine, shared=shared)

    def __call__(self, name: str, layer: int, **inputs: Array) -> dict[str, Array]:
        """Run a block for one layer; returns copies of its outputs by name."""
        programs = self._get(name)
        if name in self._host:
            return self._host[name](**inputs)
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
            program = programs[0]
            return self.cache.run(program.name, f"{program.name}_L{layer}", **inputs)
        values = dict(inputs)
        for program in programs:
            mine = {b.name: values[b.name] for b in program.buffers if b.role == "input"}
            values.update(self.cache.run(program.name, f"{program.name}_L{layer}", **mine))
        return {key: values[key] for key in self._outputs[name]}

    def _get(self, name: str) -> tuple[Program, ...]:
        try:
            return self._programs[name]
        except KeyError:
            known = ", ".join(self._programs) or "none"
            raise UnknownKernel(f"block '{name}' was not added to this runner; known: {known}") from None
