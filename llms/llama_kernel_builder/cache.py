"""KernelCache: compile once, run many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llms.llama_kernel_builder.toolchains.seam import Toolchain, toolchain_for

from .artefacts import Artefact, ArtefactStore
from .driver import Driver, current
from .exceptions import BadArgument, UnknownKernel
from .profiler import Profiler
from .program import Buffer, Program
from .runtime import HostRuntime

Array = np.ndarray[Any, Any]

_DTYPES: dict[str, np.dtype[Any]] = {"bf16": np.dtype(bfloat16), "f32": np.dtype(np.float32)}
_EMPTY = np.empty(0, dtype=np.uint8)


@dataclass
class _BufferSet:
    """Buffers of one (kernel, bo_key): allocated once, weights written once."""

    program: Program
    bos: list[Any]
    sets: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    inputs: tuple[int, ...]
    bo_key: str
    static_seen: dict[int, int] = field(default_factory=dict)


class KernelCache:
    """Compiled kernels of one deployment, their buffers and their runs.

    Buffers belong to a set named by `bo_key` (default: the kernel's name); `shared_nonstatic` lets
    all sets of one kernel share every buffer but the static ones. Results are always copies: the
    next call never changes an array that was returned before. Without a `toolchain` it is the one of the
    driver's device.
    """

    def __init__(
        self,
        folder: Path,
        *,
        toolchain: Toolchain | None = None,
        driver: Driver | None = None,
        profiler: Profiler | None = None,
        shared_nonstatic: bool = False,
    ) -> None:
        self.driver = driver if driver is not None else current()
        self.store = ArtefactStore(folder, toolchain or toolchain_for(self.driver.name))
        self.profiler = profiler if profiler is not None else Profiler(self.driver.clock)
        self.shared_nonstatic = shared_nonstatic
        self._runtime: HostRuntime | None = None
        self._programs: dict[str, Program] = {}
        self._artefacts: dict[str, Artefact] = {}
        self._sets: dict[tuple[str, str], _BufferSet] = {}
        self._pool: dict[tuple[str, int, int], Any] = {}
        self._shared_static: dict[str, tuple[Any, int | None]] = {}

    @property
    def runtime(self) -> HostRuntime:
        """The host runtime; opened on first use."""
        if self._runtime is None:
            self._runtime = HostRuntime(self.driver)
        return self._runtime

    def compile_and_cache(self, program: Program) -> Artefact:
        """Compile a program unless an intact artefact of the same content exists.

        A program that replaces another of the same name drops that one's buffers. Raises
        CompileFailed or ArtefactMissing.
        """
        artefact = self.store.get(program)
        old = self._programs.get(program.name)
        if old is not None and old.digest != program.digest:
            self.release(program.name)
        self._programs[program.name] = program
        self._artefacts[program.name] = artefact
        return artefact

    def program(self, name: str) -> Program:
        """Return a compiled program; raises UnknownKernel listing the known names."""
        try:
            return self._programs[name]
        except KeyError:
            known = ", ".join(sorted(self._programs)) or "none"
            raise UnknownKernel(f"kernel '{name}' was not compiled into this cache; known: {known}") from None

    def preload(
        self, name: str, bo_key: str, static: Mapping[str, Array], *, shared: Mapping[str, str] | None = None
    ) -> None:
        """Allocate a buffer set and write its static arguments, outside any timed region.

        `shared` maps a static argument to a pool name: all sets that name the same pool use one
        buffer, written once (RoPE tables, which every layer reads).
        """
        program = self.program(name)
        bound = self._bind(program, bo_key, None, shared or {})
        for argument, array in static.items():
            if argument not in program.index:
                raise BadArgument(
                    f"kernel '{name}' has no argument '{argument}'; it has {', '.join(program.index)}"
                )
            index = program.index[argument]
            if program.buffers[index].role != "static":
                raise BadArgument(
                    f"kernel '{name}': argument '{argument}' is {program.buffers[index].role}, not static"
                )
            self._write_static(bound, index, array, (shared or {}).get(argument))

    def load_and_run(
        self,
        name: str,
        *arrays: Array | None,
        output_indices: Sequence[int] | None = None,
        static_input_indices: Sequence[int] | None = None,
        intermediate_indices: Sequence[int] | None = None,
        bo_key: str | None = None,
    ) -> tuple[Array, ...]:
        """Run a kernel over one array per argument; returns one entry per argument.

        Arrays are bf16 (`ml_dtypes.bfloat16`) or f32, C-contiguous, with as many elements as the
        argument. Index sets default to the roles of the program. Static arguments are written once
        per `bo_key` and may be None afterwards; intermediates and outputs may be None. Entries that
        are not read back are empty; the others are copies.

        Raises UnknownKernel, BadArgument (wrong count, dtype, size or layout; changed static data;
        index sets that contradict an earlier call with the same key), KernelRunError.
        """
        program = self.program(name)
        if len(arrays) != len(program.buffers):
            raise BadArgument(f"kernel '{name}' takes {len(program.buffers)} arguments, {len(arrays)} given")
        sets = None
        if output_indices is not None or static_input_indices is not None or intermediate_indices is not None:
            sets = (
                _indices(program, static_input_indices, "static"),
                _indices(program, intermediate_indices, "intermediate"),
                _indices(program, output_indices, "output"),
            )
        bound = self._bind(program, bo_key or name, sets, {})
        for index in bound.sets[0]:
            if arrays[index] is not None:
                self._write_static(bound, index, arrays[index], None)
            elif index not in bound.static_seen:
                raise BadArgument(
                    f"kernel '{name}': static argument '{program.buffers[index].name}' was never given"
                )
        inputs = []
        for index in bound.inputs:
            array = arrays[index]
            if array is None:
                raise BadArgument(f"kernel '{name}': input argument '{program.buffers[index].name}' is None")
            inputs.append(array)
        outputs = self._run(bound, inputs)
        result: list[Array] = [_EMPTY] * len(arrays)
        for index, array in zip(bound.sets[2], outputs, strict=True):
            result[index] = array
        return tuple(result)

    def run(self, name: str, bo_key: str, **inputs: Array) -> dict[str, Array]:
        """Run a preloaded kernel with inputs by name; returns copies of its outputs by name."""
        program = self.program(name)
        bound = self._bind(program, bo_key, None, {})
        missing = [program.buffers[i].name for i in bound.sets[0] if i not in bound.static_seen]
        if missing:
            raise BadArgument(
                f"kernel '{name}', buffers '{bo_key}': static {', '.join(missing)} never preloaded"
            )
        names = [program.buffers[i].name for i in bound.inputs]
        if set(names) != set(inputs):
            raise BadArgument(
                f"kernel '{name}' takes inputs {', '.join(names)}; given {', '.join(inputs) or 'none'}"
            )
        outputs = self._run(bound, [inputs[key] for key in names])
        return {program.buffers[i].name: array for i, array in zip(bound.sets[2], outputs, strict=True)}

    def release(self, name: str) -> None:
        """Drop all buffer sets of a kernel, so that its weights can be given anew."""
        if self._runtime is not None and name in self._artefacts:
            self._runtime.forget(self._artefacts[name].path, name)
        self._sets = {key: bound for key, bound in self._sets.items() if key[0] != name}
        self._pool = {key: bo for key, bo in self._pool.items() if key[0] != name}

    def close(self) -> None:
        """Drop every buffer and close the contexts. The cache can be used again afterwards."""
        self._sets.clear()
        self._pool.clear()
        self._shared_static.clear()
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    def fetch(self, kernel: str, buffer: Buffer, bo: Any) -> Array:
        """Read a buffer back to the host."""
        size, what = buffer.nbytes, (kernel, buffer.name)
        raw = self.profiler.timed("bo_read", kernel, size, self.runtime.read, bo, size, what)
        array: Array = raw.view(_DTYPES[buffer.dtype]).reshape(buffer.shape)
        return array

    # -- internals ---------------------------------------------------------------------------

    def _run(self, bound: _BufferSet, inputs: Sequence[Array]) -> list[Array]:
        name, buffers = bound.program.name, bound.program.buffers
        for index, array in zip(bound.inputs, inputs, strict=True):
            self._write(name, buffers[index], bound.bos[index], array)
        self._execute(name, bound.bo_key, bound.bos)
        return [self.fetch(name, buffers[index], bound.bos[index]) for index in bound.sets[2]]

    def _write(self, kernel: str, buffer: Buffer, bo: Any, array: Array) -> None:
        data, what = _bytes(kernel, buffer, array), (kernel, buffer.name)
        self.profiler.timed("bo_write", kernel, data.nbytes, self.runtime.write, bo, data, what)

    def _execute(self, name: str, bo_key: str, bos: Sequence[Any]) -> None:
        run = self.runtime.run_for(self._artefacts[name].path, name, bo_key, bos)
        self.profiler.timed("elf", name, 0, self.runtime.execute, name, run)

    def _bind(
        self,
        program: Program,
        bo_key: str,
        sets: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None,
        shared: Mapping[str, str],
    ) -> _BufferSet:
        key = (program.name, bo_key)
        bound = self._sets.get(key)
        if bound is not None:
            if sets is not None and sets != bound.sets:
                raise BadArgument(
                    f"kernel '{program.name}', buffers '{bo_key}': index sets (static, intermediate, output) "
                    f"{sets} differ from the first call's {bound.sets}"
                )
            return bound
        if sets is None:
            sets = (program.indices("static"), program.indices("intermediate"), program.indices("output"))
        taken = set(sets[0]) | set(sets[1]) | set(sets[2])
        inputs = tuple(i for i in range(len(program.buffers)) if i not in taken)
        bos = [self._allocate(program, i, i in sets[0], shared) for i in range(len(program.buffers))]
        bound = self._sets[key] = _BufferSet(program, bos, sets, inputs, bo_key)
        return bound

    def _allocate(self, program: Program, index: int, static: bool, shared: Mapping[str, str]) -> Any:
        buffer = program.buffers[index]
        pool_name = shared.get(buffer.name)
        if static and pool_name is not None:
            if pool_name not in self._shared_static:
                self._shared_static[pool_name] = (self.runtime.buffer(buffer.nbytes), None)
            return self._shared_static[pool_name][0]
        if static or not self.shared_nonstatic:
            return self.runtime.buffer(buffer.nbytes)
        key = (program.name, index, buffer.nbytes)
        if key not in self._pool:
            self._pool[key] = self.runtime.buffer(buffer.nbytes)
        return self._pool[key]

    def _write_static(self, bound: _BufferSet, index: int, array: Array | None, pool: str | None) -> None:
        buffer = bound.program.buffers[index]
        if array is None:
            raise BadArgument(f"kernel '{bound.program.name}': static argument '{buffer.name}' is None")
        data = _bytes(bound.program.name, buffer, array)
        mark = _fingerprint(data)
        seen = bound.static_seen.get(index)
        if seen is not None:
            if seen != mark:
                raise BadArgument(
                    f"kernel '{bound.program.name}': static argument '{buffer.name}' got other data under "
                    f"the same buffers; call release() of that kernel before loading new weights"
                )
            return
        if pool is None or self._shared_static[pool][1] != mark:
            self.runtime.write(bound.bos[index], data, (bound.program.name, buffer.name))
        if pool is not None:
            self._shared_static[pool] = (bound.bos[index], mark)
        bound.static_seen[index] = mark


def _fingerprint(data: Array) -> int:
    """A cheap mark of static data: 512 bytes spread over it. Sees other weights, not one changed element."""
    return hash((data.size, data[:: max(1, data.size // 512)].tobytes()))


def _indices(program: Program, given: Sequence[int] | None, role: str) -> tuple[int, ...]:
    if given is None:
        return program.indices(role)
    count = len(program.buffers)
    for index in given:
        if not 0 <= index < count:
            raise BadArgument(
                f"kernel '{program.name}': {role} index {index} is outside its {count} arguments"
            )
    return tuple(sorted(given))


def _bytes(kernel: str, buffer: Buffer, array: Array) -> Array:
    """View an array as bytes after checking dtype, size and layout; the driver would ignore strides."""
    expected = _DTYPES[buffer.dtype]
    if not isinstance(array, np.ndarray):
        raise BadArgument(
            f"kernel '{kernel}', argument '{buffer.name}': {type(array).__name__} is no numpy array"
        )
    if array.dtype != expected:
        raise BadArgument(
            f"kernel '{kernel}', argument '{buffer.name}': dtype {array.dtype}, expected {expected}"
        )
    if array.size != buffer.elements:
        raise BadArgument(
            f"kernel '{kernel}', argument '{buffer.name}': shape {array.shape} has {array.size} elements, "
            f"expected {buffer.shape}"
        )
    if not array.flags.c_contiguous:
        raise BadArgument(
            f"kernel '{kernel}', argument '{buffer.name}': array is not C-contiguous; "
            "pass numpy.ascontiguousarray(array)"
        )
    return array.reshape(-1).view(np.uint8)
