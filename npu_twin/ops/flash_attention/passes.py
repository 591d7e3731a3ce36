"""What happens between the matrix products of attention, compiled: softmax of a chunk, sums with fading.

Columns are queries, independent of each other. Values are bf16 held as f32, each operation rounds in the
mode of the launch; the sum over the keys of a chunk runs upward in f32 and rounds once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fixed_order.threads import Call
from npu_twin.bf16 import F32, U16
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.blockfloat import BLOCK, EXPONENT, block_constants
from npu_twin.datapath.passes import MODE, Rounding, in_lanes, looked_up, mode_slots

_COLUMNS = 64  # columns of a piece of work
_ROWS = 16  # rows of a piece of work
_ALONE = 1 << 14

_SOFTMAX = ("keys", "columns", "group", "first", "late", "lowest", "blocks", "raise", "magic", "limit")
_STATE = ("state_next", "maximum", "denominator", "fade", "table", "score", "across")


def _emit_softmax(module: Any) -> str:
    """See :func:`probabilities`."""
    from llvmlite import ir

    from fixed_order.emit import F32 as F
    from fixed_order.emit import I16, I32, Task, i64, vector

    t = Task(module, "softmax", (*_SOFTMAX, *_STATE, *MODE))
    b = t.b
    keys, columns, across, step = (t.argument(key) for key in ("keys", "columns", "across", "state_next"))
    group, late, lowest, up, magic, limit = (
        b.trunc(t.argument(key), I32) for key in ("group", "late", "lowest", "raise", "magic", "limit")
    )
    first, blocks = (b.icmp_signed("!=", t.argument(key), i64(0)) for key in ("first", "blocks"))
    score, table, maximum, denominator, fade = (
        t.pointer(key) for key in ("score", "table", "maximum", "denominator", "fade")
    )
    rounding = Rounding(t)

    def body(base: Any, state: Any, index: Any, lanes: int) -> None:
        kind, whole = (vector(k, lanes) if lanes > 1 else k for k in (F, I32))

        def spread(value: Any) -> Any:
            return t.splat(value, lanes) if lanes > 1 else value

        def place(key: Any) -> Any:
            return b.add(b.mul(key, columns), index)

        def larger(x: Any, y: Any) -> Any:
            """The larger one; a NaN on either side stays."""
            keep = b.or_(b.fcmp_ordered(">=", x, y), b.fcmp_unordered("uno", x, x))
            return b.select(keep, x, y)

        one = ir.Constant(whole, list(range(lanes))) if lanes > 1 else ir.Constant(I32, 0)
        query = b.udiv(b.add(spread(b.trunc(index, I32)), one), spread(group))
        here = b.add(state, index)
        old = t.widen(t.load(maximum, here, I16, lanes), lanes)
        old = b.select(first, spread(b.bitcast(lowest, F)), old)
        new, total = t.local(kind), t.local(kind)
        b.store(old, new)
        with t.loop(i64(0), keys) as key:
            value = rounding.wide(t.load(base, place(key), F, lanes))
            hidden = b.icmp_signed(">", spread(b.add(late, b.trunc(key, I32))), query)
            value = b.select(hidden, b.fadd(value, t.constant(kind, float("-inf"))), value)
            t.store(value, base, place(key), F)
            b.store(larger(b.load(new, typ=kind), value), new)
        top = b.load(new, typ=kind)
        b.store(t.constant(kind, 0.0), total)
        with t.loop(i64(0), keys, BLOCK) as key:
            weights = []
            for j in range(BLOCK):
                at = place(b.add(key, i64(j)))
                difference = b.fsub(t.load(base, at, F, lanes), top)
                weights.append((at, looked_up(t, table, rounding.bits(difference))))
            for _, weight in weights:
                b.store(b.fadd(b.load(total, typ=kind), weight), total)
            # no weight is negative, so that bit patterns are in the order of the values
            block = [b.bitcast(weight, whole) for _, weight in weights]
            while len(block) > 1:
                block = [
                    b.select(b.icmp_signed(">", x, y), x, y)
                    for x, y in zip(block[::2], block[1::2], strict=True)
                ]
            exponent = b.and_(b.add(block[0], spread(up)), t.constant(whole, EXPONENT))
            over = b.icmp_signed(">", exponent, spread(limit))
            number = b.bitcast(b.or_(b.add(exponent, spread(magic)), t.constant(whole, 0x400000)), kind)
            for at, weight in weights:
                rounded = b.fsub(b.fadd(weight, number), number)
                rounded = b.select(over, t.constant(kind, float("nan")), rounded)
                t.store(b.select(blocks, rounded, weight), base, at, F)
        added = rounding.wide(b.load(total, typ=kind))
        faded = looked_up(t, table, rounding.bits(b.fsub(old, top)))
        before = t.widen(t.load(denominator, here, I16, lanes), lanes)
        both = b.fadd(rounding.wide(b.fmul(before, faded)), added)
        both = b.select(first, added, both)
        t.store(rounding.bits(both), denominator, here, I16)
        t.store(rounding.bits(top), maximum, here, I16)
        t.store(rounding.bits(faded), fade, here, I16)

    with t.pieces() as piece:
        head, part = b.sdiv(piece, across), b.srem(piece, across)
        start = b.mul(part, i64(_COLUMNS))
        stop = t.smaller(b.add(start, i64(_COLUMNS)), columns)
        base = t.at(score, b.mul(head, b.mul(keys, columns)), F)
        state = b.mul(head, step)
        in_lanes(t, start, stop, lambda index, lanes: body(base, state, index, lanes))
    return "softmax"


_FADE = ("rows", "columns", "blocks", "first", "narrow", "own_head", "own_row", "own_fade_next")
_OTHER = ("own", "own_fade", "other_head", "other_row", "other", "other_fade", "other_fade_next")


def _emit_fade(module: Any) -> str:
    """See :func:`faded_sum` and :func:`merged`."""
    from fixed_order.emit import F32 as F
    from fixed_order.emit import I16, Task, i64

    t = Task(module, "fade", (*_FADE, *_OTHER, *MODE))
    b = t.b
    names = ("rows", "columns", "blocks", "own_head", "own_row", "other_head", "other_row")
    rows, columns, blocks, own_head, own_row, other_head, other_row = (t.argument(key) for key in names)
    own_next, other_next = (t.argument(key) for key in ("own_fade_next", "other_fade_next"))
    own, own_fade, other, other_fade = (t.pointer(key) for key in ("own", "own_fade", "other", "other_fade"))
    first, narrow = (b.icmp_signed("!=", t.argument(key), i64(0)) for key in ("first", "narrow"))
    rounding = Rounding(t)
    with t.pieces() as piece:
        head, start = b.sdiv(piece, blocks), b.mul(b.srem(piece, blocks), i64(_ROWS))
        fade = t.at(own_fade, b.mul(head, own_next), I16)
        later = t.at(other_fade, b.mul(head, other_next), I16)
        with t.loop(start, t.smaller(b.add(start, i64(_ROWS)), rows)) as row:
            target = t.at(own, b.add(b.mul(head, own_head), b.mul(row, own_row)), I16)
            place = b.add(b.mul(head, other_head), b.mul(row, other_row))

            def faded(bits: Any, factor: Any, index: Any, lanes: int) -> Any:
                value, scale = (t.widen(t.load(x, index, I16, lanes), lanes) for x in (bits, factor))
                return rounding.wide(b.fmul(value, scale))

            def sum_of_stages(index: Any, lanes: int, target: Any = target, place: Any = place) -> None:
                mine = faded(target, fade, index, lanes)
                theirs = faded(t.at(other, place, I16), later, index, lanes)
                t.store(rounding.bits(b.fadd(mine, theirs)), target, index, I16)

            def with_product(index: Any, lanes: int, target: Any = target, place: Any = place) -> None:
                product = t.load(t.at(other, place, F), index, F, lanes)
                both = b.fadd(product, faded(target, fade, index, lanes))
                t.store(rounding.bits(b.select(first, product, both)), target, index, I16)

            with b.if_else(narrow) as (short, long):
                with short:
                    in_lanes(t, i64(0), columns, sum_of_stages)
                with long:
                    in_lanes(t, i64(0), columns, with_product)
    return "fade"


def probabilities(
    score: F32,
    state: tuple[U16, U16, U16],
    table: F32,
    late: int,
    group: int,
    first: bool,
    choice: Arithmetic,
    rounding: str,
    lowest: int,
) -> None:
    """Turn scores into block-quantised probabilities in place, and update maximum and denominator.

    Args:
        score: ``[B, keys, columns]``, contiguous, not yet rounded.
        state: maximum, denominator and fade, bf16 bits ``[B, columns]`` with one stride along B; the fade,
            what earlier sums are multiplied with, is written.
        table: ``exp2_table``.
        late: the first key comes this many queries after that of the first column, by which keys are hidden;
            a number below minus keys hides none.
        group: columns of one query.
        first: whether maximum and denominator are empty yet.
        choice: whether and how probabilities are quantised; saturating blocks are left to the caller.
        rounding: mode of each operation.
        lowest: f32 bits of the maximum of nothing.
    """
    batch, keys, columns = score.shape
    across = -(-columns // _COLUMNS)
    constants = block_constants(choice)
    slots = [batch * across, keys, columns, group, int(first), late, lowest, int(constants is not None)]
    slots += constants or (0, 0, 0)
    slots += [state[0].strides[0] // 2, *(array.ctypes.data for array in state)]
    slots += [table.ctypes.data, score.ctypes.data, across, *mode_slots(rounding)]
    Call(_library().address["softmax"], slots, (), alone=score.size < _ALONE)()


def _fade(own: U16, fade: U16, other: Any, other_fade: U16, first: bool, rounding: str) -> None:
    batch, rows, columns = own.shape
    blocks, size = -(-rows // _ROWS), other.itemsize
    slots = [batch * blocks, rows, columns, blocks, int(first), int(size == 2)]
    slots += [own.strides[0] // 2, own.strides[1] // 2, fade.strides[0] // 2, own.ctypes.data]
    slots += [fade.ctypes.data, other.strides[0] // size, other.strides[1] // size, other.ctypes.data]
    slots += [other_fade.ctypes.data, other_fade.strides[0] // 2, *mode_slots(rounding)]
    Call(_library().address["fade"], slots, (), alone=own.size < _ALONE)()


def faded_sum(own: U16, fade: U16, product: F32, first: bool, rounding: str) -> None:
    """``own[B, rows, columns]`` = ``own * fade[B, columns] + product``; only the product if ``first``.

    Elements along the last dimension are neighbours in all arrays. ``own`` and ``fade`` are bf16 bits.
    """
    _fade(own, fade, product, fade, first, rounding)


def merged(own: U16, fade: U16, other: U16, other_fade: U16, rounding: str) -> None:
    """``own`` = ``own * fade + other * other_fade``, bf16 bits as in :func:`faded_sum`."""
    _fade(own, fade, other, other_fade, False, rounding)


@lru_cache(maxsize=1)
def _library() -> Any:
    from fixed_order.machine import build

    return build(_emit_softmax, _emit_fade)
