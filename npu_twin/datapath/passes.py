"""Element-wise datapaths compiled into one pass each: add, table times factor, rotation, RMS norm.

Every operation is one correctly rounded f32 operation on one element, and results round to bf16 in the mode
of the launch, so no width of a vector and no number of threads changes a bit. Products are not fused with
sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np

from fixed_order.threads import Call
from npu_twin.bf16 import F32, FLOOR, U16

LANES = 16
"""Elements that are walked together; in the norm also its running sums, the lanes of the core's vector."""

_WIDTH = 4096  # elements of a row of operands that have none
_PIECE = 1 << 14
_ALONE = 1 << 15  # elements below which waking a thread costs more than it brings
MODE = ("down", "odd", "bias")
"""Names of a task's arguments for :class:`Rounding`."""


def mode_slots(rounding: str) -> list[int]:
    """Arguments ``down``, ``odd``, ``bias`` of :class:`Rounding`."""
    return [0xFFFF, 0, 0] if rounding == FLOOR else [0, 1, 0x7FFF]


class Rounding:
    """Rounds f32 to bf16 in the mode that a task's arguments name.

    What is added before the lower half is cut: 0xFFFF to negative values (toward minus infinity), or 0x7FFF
    and the last bit that stays (nearest even). A NaN whose payload lies in the upper half stays as it is.
    """

    def __init__(self, task: Any) -> None:
        from fixed_order.emit import I32

        self._t = task
        self._masks = [task.b.trunc(task.argument(name), I32) for name in MODE]

    def _whole(self, value: Any) -> Any:
        from llvmlite import ir

        from fixed_order.emit import I32, vector

        t, b = self._t, self._t.b
        lanes = value.type.count if isinstance(value.type, ir.VectorType) else 0
        kind = vector(I32, lanes) if lanes else I32
        down, odd, bias = (t.splat(mask, lanes) if lanes else mask for mask in self._masks)
        bits = b.bitcast(value, kind)
        lower = b.and_(b.ashr(bits, t.constant(kind, 31)), down)
        last = b.and_(b.lshr(bits, t.constant(kind, 16)), odd)
        return b.add(bits, b.add(b.add(lower, last), bias))

    def bits(self, value: Any) -> Any:
        """Bf16 bits of f32 values."""
        from llvmlite import ir

        from fixed_order.emit import I16, vector

        t, whole = self._t, self._whole(value)
        kind = vector(I16, whole.type.count) if isinstance(whole.type, ir.VectorType) else I16
        return t.b.trunc(t.b.lshr(whole, t.constant(whole.type, 16)), kind)

    def wide(self, value: Any) -> Any:
        """The rounded values as f32."""
        t, whole = self._t, self._whole(value)
        return t.b.bitcast(t.b.and_(whole, t.constant(whole.type, -0x10000)), value.type)


def looked_up(t: Any, table: Any, bits: Any) -> Any:
    """``table[bits]`` of an f32 table for bf16 bits, one or a vector of them."""
    from llvmlite import ir

    from fixed_order.emit import F32 as F
    from fixed_order.emit import I1, I32, I64, PTR, vector

    b = t.b
    if not isinstance(bits.type, ir.VectorType):
        return t.load(table, b.zext(bits, I64), F)
    lanes = bits.type.count
    places = b.gep(table, [b.zext(bits, vector(I64, lanes))], source_etype=F)
    places.type = vector(PTR, lanes)  # llvmlite types it as one pointer
    name = f"llvm.masked.gather.v{lanes}f32.v{lanes}p0"
    kinds = [places.type, I32, vector(I1, lanes), vector(F, lanes)]
    gather = t.module.globals.get(name) or ir.Function(
        t.module, ir.FunctionType(vector(F, lanes), kinds), name
    )
    every = ir.Constant(vector(I1, lanes), [1] * lanes)
    return b.call(gather, [places, ir.Constant(I32, 4), every, t.constant(vector(F, lanes), 0.0)])


def in_lanes(t: Any, start: Any, stop: Any, body: Any) -> None:
    """``body(index, lanes)`` from ``start`` to ``stop``: 16 lanes at a time, then one by one."""
    from fixed_order.emit import i64

    middle = t.b.add(start, t.b.and_(t.b.sub(stop, start), i64(-LANES)))
    with t.loop(start, middle, LANES) as index:
        body(index, LANES)
    with t.loop(middle, stop) as index:
        body(index, 1)


@contextmanager
def _rows(t: Any) -> Iterator[Any]:
    """Body for each row of each piece."""
    rows, each = t.argument("rows"), t.argument("each")
    with t.pieces() as piece:
        first = t.b.mul(piece, each)
        last = t.smaller(t.b.add(first, each), rows)
        with t.loop(first, last) as row:
            yield row


def _emit_pair(module: Any, name: str) -> str:
    """``add``: a + b. ``scaled``: table[a] * b. Rows of ``width``, the last one maybe shorter."""
    from fixed_order.emit import I16, Task

    arguments = ("rows", "each", "n", "width", "b_next", "table", "a", "b", "out", *MODE)
    t = Task(module, name, arguments)
    b = t.b
    n, width, b_next = (t.argument(key) for key in ("n", "width", "b_next"))
    table, left, right, out = (t.pointer(key) for key in ("table", "a", "b", "out"))
    rounding = Rounding(t)
    with _rows(t) as row:
        start = b.mul(row, width)
        stop = t.smaller(b.add(start, width), n)
        other = b.sub(b.mul(row, b_next), start)

        def body(index: Any, lanes: int) -> None:
            x = t.load(left, index, I16, lanes)
            y = t.widen(t.load(right, b.add(index, other), I16, lanes), lanes)
            value = b.fadd(t.widen(x, lanes), y) if name == "add" else b.fmul(looked_up(t, table, x), y)
            t.store(rounding.bits(value), out, index, I16)

        in_lanes(t, start, stop, body)
    return name


def _emit_rotate(module: Any, split: bool) -> str:
    """Rotate the pairs (i, i + half), or (2i, 2i + 1), of rows by the angles [cos half | sin half]."""
    from llvmlite import ir

    from fixed_order.emit import I16, I32, Task, i64, vector

    name = "rotate_halves" if split else "rotate_neighbours"
    t = Task(module, name, ("rows", "each", "half", "x", "angles", "out", *MODE))
    b = t.b
    half = t.argument("half")
    x, angles, out = (t.pointer(key) for key in ("x", "angles", "out"))
    rounding = Rounding(t)

    def order(places: Any) -> Any:
        return ir.Constant(vector(I32, len(places)), list(places))

    with _rows(t) as row:
        start = b.mul(row, b.shl(half, i64(1)))

        def body(index: Any, lanes: int) -> None:
            at = b.add(start, index)
            places = (at, b.add(at, half)) if split else (b.add(at, index), b.add(b.add(at, index), i64(1)))
            if split or lanes == 1:
                pair = [t.load(x, place, I16, lanes) for place in places]
            else:
                both = t.load(x, places[0], I16, 2 * lanes)
                pair = [b.shuffle_vector(both, both, order(range(k, 2 * lanes, 2))) for k in (0, 1)]
            first, second = (t.widen(bits, lanes) for bits in pair)
            cos, sin = (t.widen(t.load(angles, place, I16, lanes), lanes) for place in (at, b.add(at, half)))
            turned = [
                rounding.bits(b.fsub(b.fmul(first, cos), b.fmul(second, sin))),
                rounding.bits(b.fadd(b.fmul(second, cos), b.fmul(first, sin))),
            ]
            if split or lanes == 1:
                for bits, place in zip(turned, places, strict=True):
                    t.store(bits, out, place, I16)
            else:
                mixed = [k + lanes * side for k in range(lanes) for side in (0, 1)]
                t.store(b.shuffle_vector(*turned, order(mixed)), out, places[0], I16)

        in_lanes(t, i64(0), half, body)
    return name


def _emit_norm(module: Any) -> str:
    """x * rsqrt(mean(x**2) + eps) * w of rows: sums in 16 lanes, then halves; bf16 after each product."""
    from fixed_order.emit import F32 as F
    from fixed_order.emit import I16, I32, Task, i64, vector

    arguments = ("rows", "each", "width", "length", "eps", "x", "w", "out", *MODE)
    t = Task(module, "rms_norm", arguments)
    b = t.b
    width = t.argument("width")
    length, eps = (b.bitcast(b.trunc(t.argument(key), I32), F) for key in ("length", "eps"))
    x, w, out = (t.pointer(key) for key in ("x", "w", "out"))
    rounding = Rounding(t)
    kind = vector(F, LANES)
    total = t.local(kind)
    root = module.declare_intrinsic("llvm.sqrt", [F])
    with _rows(t) as row:
        start = b.mul(row, width)
        b.store(t.constant(kind, 0.0), total)
        with t.loop(i64(0), width, LANES) as index:
            value = t.widen(t.load(x, b.add(start, index), I16, LANES), LANES)
            b.store(b.fadd(b.load(total, typ=kind), b.fmul(value, value)), total)
        mean = b.fadd(b.fdiv(t.halved(b.load(total, typ=kind)), length), eps)
        inverse = rounding.wide(b.fdiv(t.constant(F, 1.0), b.call(root, [mean])))
        scale = t.splat(inverse, LANES)
        with t.loop(i64(0), width, LANES) as index:
            at = b.add(start, index)
            value = t.widen(t.load(x, at, I16, LANES), LANES)
            factor = t.widen(t.load(w, index, I16, LANES), LANES)
            normed = rounding.wide(b.fmul(value, scale))
            t.store(rounding.bits(b.fmul(normed, factor)), out, at, I16)
    return "rms_norm"


def _call(name: str, rows: int, width: int, slots: list[int], keep: tuple[Any, ...], rounding: str) -> Call:
    each = max(1, _PIECE // max(width, 1))
    arguments = [-(-rows // each), rows, each, *slots, *mode_slots(rounding)]
    return Call(_library().address[name], arguments, keep, alone=rows * width < _ALONE)


def _addresses(*arrays: Any) -> list[int]:
    for array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError(f"an operand with strides {array.strides} is not contiguous")
    return [array.ctypes.data for array in arrays]


def _pair(name: str, table: F32 | None, a: U16, b: U16, out: U16, rounding: str) -> Call:
    n = a.size
    width = a.shape[1] if a.ndim == 2 else min(n, _WIDTH)
    step = 0 if b.size == width and b.size != n else width
    slots = [n, width, step, *([0] if table is None else _addresses(table)), *_addresses(a, b, out)]
    return _call(name, -(-n // width), width, slots, (table, a, b, out), rounding)


def added(a: U16, b: U16, out: U16, rounding: str) -> Call:
    """Step: out = a + b. Operands are contiguous bf16 bits; ``b`` may be one row for all rows of ``a``."""
    return _pair("add", None, a, b, out, rounding)


def scaled_by_table(table: F32, a: U16, b: U16, out: U16, rounding: str) -> Call:
    """Step: out[n] = table[a[n]] * b[n], ``table`` f32[65536] of bf16 values, the rest contiguous bits."""
    return _pair("scaled", table, a, b, out, rounding)


def rotated(x: U16, angles: U16, out: U16, split: bool, rounding: str) -> Call:
    """Step: rows x[rows, 2 * half] turned by angles[rows, cos half | sin half], contiguous bf16 bits.

    Pairs are (i, i + half) with ``split``, else (2i, 2i + 1).
    """
    rows, width = x.shape
    slots = [width // 2, *_addresses(x, angles, out)]
    name = "rotate_halves" if split else "rotate_neighbours"
    return _call(name, rows, width, slots, (x, angles, out), rounding)


def rms_normed(x: U16, w: U16, out: U16, eps: float, rounding: str) -> Call:
    """Step: weighted RMS norm of x[M, N] into out, contiguous bf16 bits; N is a multiple of the lanes."""
    rows, width = x.shape
    length, epsilon = (int(np.float32(value).view(np.int32)) for value in (width, eps))
    slots = [width, length, epsilon, *_addresses(x, w, out)]
    return _call("rms_norm", rows, width, slots, (x, w, out), rounding)


@lru_cache(maxsize=1)
def _library() -> Any:
    from fixed_order.machine import build

    return build(
        partial(_emit_pair, name="add"),
        partial(_emit_pair, name="scaled"),
        partial(_emit_rotate, split=True),
        partial(_emit_rotate, split=False),
        _emit_norm,
    )
