"""Building blocks of the element-wise datapaths: scratch memory, blocks and the store with its rounding.

A datapath is a list of closures over preallocated numpy views, so running one costs a few hundred nanoseconds
per numpy call and nothing else. Large operands are walked in blocks that fit the CPU's second-level cache.

Buffers named ``wide*`` hold bf16 values as f32: only their upper halves are ever written, the lower halves
stay zero. Scratch is shared by all datapaths of the process, hence prepared launches must not run at the same
time in two threads; the device runs one launch after the other anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from npu_twin.bf16 import F32, FLOOR, U16

Step = Callable[[], None]

BLOCK = 32768
"""Elements per block: four f32 buffers of this size stay within half a megabyte."""

_pool: dict[str, F32] = {}


def scratch(name: str, shape: tuple[int, ...]) -> F32:
    """Zero-initialised shared f32 buffer of that name, at least as large as ``shape``, as a view of that
    shape. Small buffers of one name are one allocation; a larger request makes a new one.
    """
    size = int(np.prod(shape))
    base = _pool.get(name)
    if base is None or base.size < size:
        base = _pool[name] = np.zeros(max(size, BLOCK), np.float32)
    return base[:size].reshape(shape)


def upper(array: F32) -> U16:
    """Strided view of the upper halves of an f32 array, i.e. of the bf16 bits of bf16-valued elements."""
    return array.view(np.uint16).reshape(*array.shape, 2)[..., 1]


def lower(array: F32) -> U16:
    """Strided view of the lower halves of an f32 array."""
    return array.view(np.uint16).reshape(*array.shape, 2)[..., 0]


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices of whole rows with about BLOCK elements each."""
    per_block = max(1, BLOCK // width)
    for start in range(0, rows, per_block):
        yield slice(start, min(rows, start + per_block))


def round_into(source: F32, target: U16, rounding: str, tag: str = "round", *, keep: bool = False) -> Step:
    """Closure that rounds ``source`` to bf16 and writes the bits to ``target``, same shape.

    ``source`` is overwritten unless ``keep``; ``tag`` names the scratch memory.

    ``target`` is an operand or the :func:`upper` half of a wide buffer. A NaN whose payload lies only in the
    lower half is not preserved; arithmetic on bf16 operands never makes one.
    """
    work = scratch(tag, source.shape)
    summed = scratch(f"{tag}.sum", source.shape) if keep else source
    u, w, total = source.view(np.uint32), work.view(np.uint32), summed.view(np.uint32)
    top, low = upper(summed), lower(work)
    add, shift, copyto = np.add, np.right_shift, np.copyto
    if rounding == FLOOR:
        # Bits of a negative value count away from zero: (u - 1 >> 16) + 1 rounds them up, u >> 16 rounds the
        # others down. The shifted sign is 0 or -1 and supplies both ones.
        signed, sign, subtract, places = source.view(np.int32), work.view(np.int32), np.subtract, np.int32(31)

        def store() -> None:
            shift(signed, places, out=sign)
            add(u, w, out=total)
            subtract(top, low, out=target)

        return store

    sixteen, one, half = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)
    bit_and = np.bitwise_and

    def store_nearest() -> None:
        shift(u, sixteen, out=w)
        bit_and(w, one, out=w)
        add(w, half, out=w)
        add(u, w, out=total)
        copyto(target, top)

    return store_nearest


def sequence(steps: list[Step]) -> Step:
    """One closure that runs ``steps`` in order."""
    if len(steps) == 1:
        return steps[0]
    frozen = tuple(steps)

    def run() -> None:
        for step in frozen:
            step()

    return run


def as_bf16(bits: U16) -> Any:
    """torch.bfloat16 tensor on the same memory as a uint16 array."""
    import torch

    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
