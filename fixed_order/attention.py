"""Softmax attention in f32 with one result on every CPU, for queries one at a time.

Per query: each score is a dot product with 16 running sums (as in :mod:`fixed_order.products`); the
exponential is a polynomial of separate products and sums; its total has 16 running sums; the output adds the
values key after key. A product that is not exact is never fused with the sum it goes into.
"""

from __future__ import annotations

from functools import lru_cache
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from fixed_order.threads import Call, available

LANES = 16

U16 = npt.NDArray[np.uint16]

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
"""ln 2 in two parts, the first with nine bits, so that its product with an exponent is exact."""

EXP_TERMS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
"""Cephes' polynomial for exp on [-ln2/2, ln2/2] (expf.c), highest power first; then x and 1 are added."""

LOWEST = -87.0
"""Below this the result is zero; exp(-87) is still a normal f32."""

_SHAPE = (
    *("workers", "d", "group", "heads", "keys", "growth", "scale", "scratch", "scratch_next"),
    *("q", "q_row", "q_head", "k", "k_row", "k_head", "v", "v_row", "v_head", "out", "out_row"),
)


def emit_exp(t: Any, x: Any) -> Any:
    """Vector of exp(x) for f32 x <= 0, minus infinity included, within 2 ULPs."""
    from fixed_order.emit import F32, I32, vector

    b, kind, whole = t.b, x.type, vector(I32, x.type.count)
    low = b.fcmp_ordered("<", x, t.constant(kind, LOWEST))
    x = b.select(low, t.constant(kind, LOWEST), x)
    magic = t.constant(kind, 12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number
    shifted = b.fadd(b.fmul(x, t.constant(kind, np.float32(LOG2_E))), magic)
    n = b.fsub(shifted, magic)
    r = b.fsub(x, b.fmul(n, t.constant(kind, np.float32(LN2_HIGH))))
    r = b.fsub(r, b.fmul(n, t.constant(kind, np.float32(LN2_LOW))))
    p = t.constant(kind, np.float32(EXP_TERMS[0]))
    for term in EXP_TERMS[1:]:
        p = b.fadd(b.fmul(p, r), t.constant(kind, np.float32(term)))
    p = b.fadd(b.fadd(b.fmul(p, b.fmul(r, r)), r), t.constant(kind, 1.0))
    exponent = b.shl(b.fptosi(n, whole), t.constant(whole, 23))
    value = b.bitcast(b.add(b.bitcast(p, whole), exponent), kind)
    assert kind.element == F32
    return b.select(low, t.constant(kind, 0.0), value)


def _emit(module: Any) -> str:
    from llvmlite import ir

    from fixed_order.emit import F32 as F
    from fixed_order.emit import I16, I32, I64, Task, i64, vector

    t = Task(module, "attend", _SHAPE)
    b = t.b
    slot = t.at(t.arguments[0], i64(t.names.index("workers")), I64)
    me = b.atomic_rmw("add", slot, i64(1), "monotonic")
    d, group, heads, keys, growth = (t.argument(n) for n in ("d", "group", "heads", "keys", "growth"))
    strides = {n: t.argument(n) for n in _SHAPE if n.endswith(("_row", "_head"))}
    q, k, v, out = (t.pointer(n) for n in ("q", "k", "v", "out"))
    scores = t.at(t.pointer("scratch"), b.mul(me, t.argument("scratch_next")), F)
    scale = b.bitcast(b.trunc(t.argument("scale"), I32), F)
    wide = vector(F, LANES)
    spill = t.local(ir.ArrayType(F, LANES))
    total, largest = t.local(wide), t.local(wide)
    whole = b.and_(d, i64(-LANES))

    def dot(query: Any, key: Any) -> Any:
        b.store(t.constant(wide, 0.0), total)
        with t.loop(i64(0), whole, LANES) as at:
            x, y = (t.widen(t.load(source, at, I16, LANES), LANES) for source in (query, key))
            b.store(t.exact_product_added(b.load(total, typ=wide), x, y), total)
        with b.if_then(b.icmp_signed("<", whole, d)):
            b.store(b.load(total, typ=wide), spill)
            with t.loop(whole, d) as at:
                x, y = (t.widen(t.load(source, at, I16), 1) for source in (query, key))
                lane = b.sub(at, whole)
                t.store(t.exact_product_added(t.load(spill, lane, F), x, y), spill, lane, F)
            b.store(b.load(spill, typ=wide), total)
        return t.halved(b.load(total, typ=wide))

    def largest_lane(value: Any) -> Any:
        best = b.extract_element(value, ir.Constant(I32, 0))
        for lane in range(1, LANES):
            other = b.extract_element(value, ir.Constant(I32, lane))
            best = b.select(b.fcmp_ordered(">", other, best), other, best)
        return best

    def output(source: Any, count: Any, start: Any, lanes: int, target: Any) -> None:
        """``lanes`` elements of the result from ``start`` on, the keys in order."""
        kind = vector(F, lanes) if lanes > 1 else F
        sums = t.local(kind)
        b.store(t.constant(kind, 0.0), sums)
        with t.loop(i64(0), count) as key:
            weight = t.load(scores, key, F)
            weight = t.splat(weight, lanes) if lanes > 1 else weight
            place = b.add(b.mul(key, strides["v_row"]), start)
            value = t.widen(t.load(source, place, I16, lanes), lanes)
            b.store(b.fadd(b.load(sums, typ=kind), b.fmul(weight, value)), sums)
        t.store(t.nearest_even(b.load(sums, typ=kind)), target, start, I16)

    with t.pieces() as piece:
        row, head = b.sdiv(piece, heads), b.srem(piece, heads)
        kv = b.sdiv(head, group)
        query = t.at(q, b.add(b.mul(row, strides["q_row"]), b.mul(head, strides["q_head"])), I16)
        key_base = t.at(k, b.mul(kv, strides["k_head"]), I16)
        value_base = t.at(v, b.mul(kv, strides["v_head"]), I16)
        target = t.at(out, b.add(b.mul(row, strides["out_row"]), b.mul(head, d)), I16)
        count = b.add(keys, b.mul(row, growth))
        padded = b.and_(b.add(count, i64(LANES - 1)), i64(-LANES))
        with t.loop(i64(0), count) as key:
            score = b.fmul(dot(query, t.at(key_base, b.mul(key, strides["k_row"]), I16)), scale)
            t.store(score, scores, key, F)
        with t.loop(count, padded) as key:
            t.store(ir.Constant(F, float("-inf")), scores, key, F)
        b.store(t.constant(wide, float("-inf")), largest)
        with t.loop(i64(0), padded, LANES) as key:
            old, new = b.load(largest, typ=wide), t.load(scores, key, F, LANES)
            # a NaN is kept, so that it shows in the result
            b.store(b.select(b.fcmp_ordered("<=", new, old), old, new), largest)
        top = t.splat(largest_lane(b.load(largest, typ=wide)), LANES)
        b.store(t.constant(wide, 0.0), total)
        with t.loop(i64(0), padded, LANES) as key:
            value = emit_exp(t, b.fsub(t.load(scores, key, F, LANES), top))
            t.store(value, scores, key, F)
            b.store(b.fadd(b.load(total, typ=wide), value), total)
        divisor = t.splat(t.halved(b.load(total, typ=wide)), LANES)
        with t.loop(i64(0), padded, LANES) as key:
            t.store(b.fdiv(t.load(scores, key, F, LANES), divisor), scores, key, F)
        wider = b.and_(d, i64(-4 * LANES))
        with t.loop(i64(0), wider, 4 * LANES) as at:
            output(value_base, count, at, 4 * LANES, target)
        eighths = b.and_(d, i64(-8))
        with t.loop(wider, eighths, 8) as at:
            output(value_base, count, at, 8, target)
        with t.loop(eighths, d) as at:
            output(value_base, count, at, 1, target)
    return "attend"


def attend(q: U16, k: U16, v: U16, out: U16, *, keys: int, causal: bool = False) -> None:
    """``out[n, heads, d]`` = softmax(q k^T / sqrt(d)) v in f32, one rounding to nearest even; bf16 bits.

    Args:
        q: ``[n, heads, d]``.
        k, v: ``[kv_heads, length, d]``, any strides but along d; query head h reads head
            h // (heads / kv_heads).
        out: contiguous.
        keys: number of keys that the first query sees; with ``causal`` each further query sees one more.

    Raises:
        ValueError: more keys are asked for than there are.
    """
    n, heads, d = q.shape
    kv_heads, length = k.shape[:2]
    most = keys + (n - 1 if causal else 0)
    if not 0 < most <= length or keys < 1:
        raise ValueError(f"{n} queries see {keys} to {most} keys, but there are {length}")
    padded = -(-most // LANES) * LANES
    small = n * heads * most * d < 1 << 17
    threads = 1 if small else available()
    scratch = np.empty((threads, padded), np.float32)
    scale = int(np.float32(1.0 / sqrt(d)).view(np.int32))
    arguments = [
        n * heads,
        0,
        d,
        heads // kv_heads,
        heads,
        keys,
        int(causal),
        scale,
        scratch.ctypes.data,
        padded,
    ]
    for array, row, head in ((q, 0, 1), (k, 1, 0), (v, 1, 0)):
        arguments += [array.ctypes.data, array.strides[row] // 2, array.strides[head] // 2]
    arguments += [out.ctypes.data, heads * d]
    Call(_library().address["attend"], arguments, (), alone=small)()


@lru_cache(maxsize=1)
def _library() -> Any:
    from fixed_order.machine import build

    return build(_emit)
