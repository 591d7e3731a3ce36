"""Device memory of the twin and the views through which datapaths see it.

Silicon shares memory between host and device; the twin deliberately keeps a second copy, so that a forgotten
sync shows. New memory is poisoned: every 16-bit word is a bf16 NaN, and every 32-bit word an f32 NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

POISON_WORD = 0x7FC0
"""Quiet NaN as bf16; two of them, 0x7FC07FC0, are a quiet NaN as f32."""

ITEMSIZE = {"bf16": 2, "f32": 4}
"""Bytes per element of the data types that kernel operands have."""

_ALIGN = 64


def poisoned(nbytes: int) -> npt.NDArray[np.uint8]:
    """New uint8[nbytes], 64-byte aligned, filled with the NaN pattern."""
    raw = np.empty(nbytes + _ALIGN + 1, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGN
    even = raw[start : start + nbytes + (nbytes & 1)]
    even.view(np.uint16).fill(POISON_WORD)
    return even[:nbytes]


class DeviceMemory:
    """One allocation in device memory.

    ``data`` is uint8[nbytes]. ``version`` grows with every change of the content that goes through
    :meth:`changed`; values derived from the content (a block-quantised weight) are kept in ``derived`` until
    then. Whoever writes ``data`` calls :meth:`changed` afterwards.
    """

    __slots__ = ("__weakref__", "data", "derived", "version")

    def __init__(self, nbytes: int, poison: bool = True) -> None:
        if nbytes <= 0:
            raise ValueError(f"device memory needs a positive size, not {nbytes}")
        self.data = poisoned(nbytes) if poison else np.empty(nbytes, np.uint8)
        self.version = 0
        self.derived: dict[tuple[object, ...], Any] = {}

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.data.nbytes)

    def changed(self) -> None:
        """Note that the content changed: derived values are dropped."""
        self.version += 1
        if self.derived:
            self.derived.clear()

    def view(self, offset: int, shape: Sequence[int], dtype: str) -> OperandView:
        """View of ``shape`` elements of ``dtype`` (``bf16`` or ``f32``) from byte ``offset`` on."""
        return OperandView(self, offset, shape, dtype)


class OperandView:
    """A contiguous range of device memory as a kernel operand.

    ``u16`` (bf16 operands: the raw bits) or ``f32`` (f32 operands) is a shaped ndarray on the live device
    memory, not a copy. Asking for the other one raises AttributeError, so a datapath cannot misread the type.
    """

    __slots__ = ("_key", "dtype", "f32", "memory", "offset", "shape", "u16")

    u16: npt.NDArray[np.uint16]
    f32: npt.NDArray[np.float32]

    def __init__(self, memory: DeviceMemory, offset: int, shape: Sequence[int], dtype: str) -> None:
        if dtype not in ITEMSIZE:
            raise ValueError(f"operand dtype {dtype!r} is not one of {', '.join(ITEMSIZE)}")
        dims = tuple(int(n) for n in shape)
        nbytes = math.prod(dims) * ITEMSIZE[dtype]
        if offset < 0 or offset + nbytes > memory.nbytes or offset % ITEMSIZE[dtype]:
            raise ValueError(
                f"operand of {nbytes} bytes at byte offset {offset} does not fit {memory.nbytes} bytes of "
                f"device memory (or is not aligned to {ITEMSIZE[dtype]} bytes)"
            )
        self.memory = memory
        self.offset = offset
        self.shape = dims
        self.dtype = dtype
        self._key = (offset, dims, dtype)
        raw = memory.data[offset : offset + nbytes]
        if dtype == "bf16":
            self.u16 = raw.view(np.uint16).reshape(dims)
        else:
            self.f32 = raw.view(np.float32).reshape(dims)

    @classmethod
    def from_array(cls, array: npt.NDArray[Any]) -> OperandView:
        """Fresh device memory holding a copy of ``array`` (uint16 bf16 bits, or float32), for tests and
        tools.
        """
        dtype = {"uint16": "bf16", "float32": "f32"}.get(array.dtype.name)
        if dtype is None:
            raise ValueError(f"an operand is uint16 (bf16 bits) or float32, not {array.dtype}")
        view = cls(DeviceMemory(array.nbytes), 0, array.shape, dtype)
        view.array[...] = array
        return view

    @property
    def array(self) -> npt.NDArray[Any]:
        """The ndarray on device memory, whichever type it has."""
        return self.u16 if self.dtype == "bf16" else self.f32

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.array.nbytes)

    def derived(self, key: str, make: Callable[[], T]) -> T:
        """Value computed from the content of this range, made again only after the device memory changed."""
        cache = self.memory.derived
        full = (key, self._key)
        found = cache.get(full)
        if found is None:
            found = cache[full] = make()
        return cast(T, found)

    def __getattr__(self, name: str) -> Any:
        if name in ("u16", "f32"):
            raise AttributeError(
                f"operand of type {self.dtype} has no .{name}; it was read as the wrong type"
            )
        raise AttributeError(name)

    def __repr__(self) -> str:
        dims = "x".join(map(str, self.shape))
        return f"<OperandView {self.dtype}[{dims}] at byte {self.offset} of {self.memory.nbytes}>"
