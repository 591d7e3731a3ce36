"""Buffer reuse: results stay on the device, and a consumer reads the producer's buffer in place.

The published examples write every activation to the device and read it back for every ELF, although most of
them only go on to the next ELF. Here an output is a handle; a kernel that is given one takes over its buffer
instead of a copy, and the host reads it when it looks at the values, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from .cache import _DTYPES, Array, KernelCache, _BufferSet
from .exceptions import BadArgument
from .program import Buffer


class OnDevice(NDArrayOperatorsMixin):
    """An output that lies in its buffer. Looks like its array; using the values reads them, once.

    A later run of the same kernel may write the buffer again: values that nobody had read until then are
    gone, and asking for them raises BadArgument. Assigning to it makes it the host's array: the next kernel
    is given a copy.
    """

    def __init__(self, cache: ResidentCache, kernel: str, buffer: Buffer, bo: Any) -> None:
        self._cache = cache
        self._kernel = kernel
        self._buffer = buffer
        self._generation = cache.generation(bo)
        self._value: Array | None = None
        self._changed = False
        self.bo = bo
        self.shape = buffer.shape
        self.dtype = _DTYPES[buffer.dtype]
        self.nbytes = buffer.nbytes

    @property
    def fresh(self) -> bool:
        """Whether the buffer still holds this output."""
        return self._cache.generation(self.bo) == self._generation

    def feeds(self, buffer: Buffer) -> bool:
        """Whether a kernel can read this output in place as `buffer`: same type, same number of bytes."""
        return (
            not self._changed
            and self.fresh
            and (buffer.dtype, buffer.nbytes) == (self._buffer.dtype, self._buffer.nbytes)
        )

    def numpy(self) -> Array:
        """The values, shaped as the output."""
        if self._value is None:
            if not self.fresh:
                raise BadArgument(
                    f"output '{self._buffer.name}' of kernel '{self._kernel}' was overwritten by a later run "
                    "before its values were read; read it, or copy it, before the kernel runs again"
                )
            self._value = self._cache.fetch(self._kernel, self._buffer, self.bo)
        return self._value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        value = self.numpy()
        return value if dtype is None else value.astype(dtype)

    def __getitem__(self, key: Any) -> Any:
        return self.numpy()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.numpy()[key] = np.asarray(value)
        self._changed = True

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = [item.numpy() if isinstance(item, OnDevice) else item for item in inputs]
        return getattr(ufunc, method)(*arrays, **options)

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.numpy(), name)


class ResidentCache(KernelCache):
    """A kernel cache whose `run` leaves outputs on the device (see the module's docstring).

    A kernel never writes a buffer it reads: where its output buffer is one of its inputs, a second one
    takes its place. `load_and_run` returns copies, as ever.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._generations: dict[int, int] = {}
        self._spares: dict[tuple[str, int], Any] = {}

    def generation(self, bo: Any) -> int:
        """How often the device wrote a buffer."""
        return self._generations.get(id(bo), 0)

    def load_and_run(self, name: str, *arrays: Array | None, **options: Any) -> tuple[Array, ...]:
        """As in KernelCache; all results are read back."""
        results = super().load_and_run(name, *arrays, **options)
        return tuple(item.numpy() if isinstance(item, OnDevice) else item for item in results)

    def release(self, name: str) -> None:
        """As in KernelCache."""
        super().release(name)
        self._spares = {key: bo for key, bo in self._spares.items() if key[0] != name}

    def close(self) -> None:
        """As in KernelCache; outputs that were not read are gone."""
        super().close()
        self._spares.clear()
        self._generations = {key: count + 1 for key, count in self._generations.items()}

    def _run(self, bound: _BufferSet, inputs: Sequence[Any]) -> list[Any]:
        name, buffers = bound.program.name, bound.program.buffers
        bos = list(bound.bos)
        taken: list[Any] = []
        for index, value in zip(bound.inputs, inputs, strict=True):
            if isinstance(value, OnDevice) and value.feeds(buffers[index]):
                bos[index] = value.bo
                taken.append(value.bo)
            else:
                array = value.numpy() if isinstance(value, OnDevice) else value
                self._write(name, buffers[index], bos[index], array)
        for index in bound.sets[2]:
            if any(bos[index] is bo for bo in taken):
                bos[index] = self._spare(name, index, buffers[index])
        pairs = enumerate(zip(bos, bound.bos, strict=True))
        changed = [f"{i}:{id(bo)}" for i, (bo, own) in pairs if bo is not own]
        self._execute(name, "|".join((bound.bo_key, *changed)), bos)
        for index in bound.sets[2]:
            self._generations[id(bos[index])] = self.generation(bos[index]) + 1
        return [OnDevice(self, name, buffers[index], bos[index]) for index in bound.sets[2]]

    def _spare(self, name: str, index: int, buffer: Buffer) -> Any:
        key = (name, index)
        if key not in self._spares:
            self._spares[key] = self.runtime.buffer(buffer.nbytes)
        return self._spares[key]
