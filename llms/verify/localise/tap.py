"""Look at every launch of a deployment as it runs: the content of all arguments of every ELF.

The programs are the deployed ones. After each run every argument is read back from the device, intermediates
included, as they are buffers too. Nothing is recompiled, so the tap works on silicon and twin alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llms.llama_kernel_builder.cache import KernelCache
from llms.llama_kernel_builder.program import Program

Array = np.ndarray[Any, Any]

_BF16 = np.dtype(bfloat16)
_LAYER = re.compile(r"_L(\d+)(?:\||$)")


@dataclass(frozen=True, eq=False)
class Call:
    """One run of one ELF: its program, its layer, and what its arguments hold afterwards.

    `arguments`: inputs, intermediates and outputs by name; static ones only at the first call of a layer.
    """

    program: Program
    layer: int
    arguments: dict[str, Array]
    static: dict[str, Array]

    def label(self, buffer: str) -> str:
        """Name of the launch that writes a buffer (`out` operand), as `program.launch`."""
        for launch in self.program.launches:
            if dict(launch.operands).get("out") and dict(launch.operands)["out"].buffer == buffer:
                if self.program.name.endswith(f".{launch.name}"):
                    return self.program.name
                return f"{self.program.name}.{launch.name}"
        return self.program.name


class Tap:
    """Collected calls, grouped by whoever runs the model: `take()` returns those since the last time."""

    def __init__(self, cache: KernelCache) -> None:
        self._cache = cache
        self._calls: list[Call] = []
        self._seen: set[tuple[str, int]] = set()

    def take(self) -> list[Call]:
        """Return and forget the calls collected so far."""
        calls, self._calls = self._calls, []
        return calls

    def observe(self, name: str, key: str, bos: Sequence[Any]) -> None:
        """Read back all arguments of a run that has just ended."""
        program = self._cache.program(name)
        found = _LAYER.search(key)
        layer = int(found.group(1)) if found else 0
        first = (name, layer) not in self._seen
        self._seen.add((name, layer))
        arguments: dict[str, Array] = {}
        static: dict[str, Array] = {}
        for buffer, bo in zip(program.buffers, bos, strict=False):
            if (buffer.role == "static" and not first) or buffer.dtype == "f32":
                continue
            raw = np.asarray(self._cache.runtime.read(bo, buffer.nbytes)).copy()
            content = raw.view(_BF16).reshape(buffer.shape)
            (static if buffer.role == "static" else arguments)[buffer.name] = content
        self._calls.append(Call(program, layer, arguments, static))


@contextmanager
def tapped(cache: KernelCache) -> Iterator[Tap]:
    """Tap every run of a cache inside the block, on the buffers that the run really has."""
    tap = Tap(cache)
    runtime = cache.runtime
    bind, execute = runtime.run_for, runtime.execute
    last = {"key": ""}

    def run_for(artefact: Path, name: str, bo_key: str, bos: Sequence[Any]) -> Any:
        last["key"] = bo_key
        return bind(artefact, name, bo_key, bos)

    def execute_and_read(name: str, bound: Any) -> None:
        execute(name, bound)
        tap.observe(name, last["key"], bound.bos)

    # setattr, as mypy takes an assignment for a change of the class
    setattr(runtime, "run_for", run_for)  # noqa: B010
    setattr(runtime, "execute", execute_and_read)  # noqa: B010
    try:
        yield tap
    finally:
        delattr(runtime, "run_for")
        delattr(runtime, "execute")
