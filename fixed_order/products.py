"""Matrix products with f32 sums of one order.

* matrix times vector: 16 running sums per output, element k along K in sum k mod 16, then sum j + 8 is added
  to sum j, and so on down to one;
* matrix times matrix: one running sum per output, k upward.

Operands are bf16 values (block-quantised ones included), whose products are exact in f32.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fixed_order.threads import Call

LANES = 16
"""Running sums of a matrix-vector product: the lanes of a vector of AIE2P. Chosen by that and by trial on the
nine published GEMV rows of mlir-air: of 4, 8, 16, 32, 64 and 128 sums, only 16 never missed the nearest bf16.
Their limits are upper bounds, so this does not show that the device sums in this order."""

PANEL = 48
"""Columns of the right factor that are walked together: three registers of 16, 8 or 4 lanes, or twice, or
four times as many."""

GROUP = 8
"""Rows of the left factor that are stored together."""

DEPTH = 256
"""Part along K that is walked at once, so that a panel of it stays in the first-level cache."""

_PIECE_BYTES = 1 << 17
_AHEAD = 2048  # elements: with this prefetch one thread reads at the speed of torch's own kernel
_SMALL = 1 << 18  # products below which waking a thread costs more than it brings

U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]


# -- matrix times vector ------------------------------------------------------------------------------------


def _emit_gemv(module: Any) -> str:
    from llvmlite import ir

    from fixed_order.emit import F32 as F
    from fixed_order.emit import I16, Task, i64, vector
    from fixed_order.machine import isa

    together = 4 if isa().lanes > 4 else 2  # rows at a time: enough sums to hide the latency of an addition
    t = Task(module, "gemv", ("M", "K", "ld", "w", "x", "out", "rows", "rounded"))
    b = t.b
    M, K, ld, rows = (t.argument(name) for name in ("M", "K", "ld", "rows"))
    w, x, out = (t.pointer(name) for name in ("w", "x", "out"))
    rounded = b.icmp_signed("!=", t.argument("rounded"), i64(0))
    wide = vector(F, LANES)
    sums = [t.local(wide) for _ in range(together)]
    spill = t.local(ir.ArrayType(F, LANES))
    whole = b.and_(K, i64(-LANES))

    def finish(total: Any, base: Any, row: Any) -> None:
        with b.if_then(b.icmp_signed("<", whole, K), likely=False):
            b.store(b.load(total, typ=wide), spill)
            with t.loop(whole, K) as k:
                lane = b.sub(k, whole)
                left, right = (t.widen(t.load(source, k, I16), 1) for source in (base, x))
                t.store(t.exact_product_added(t.load(spill, lane, F), left, right), spill, lane, F)
            b.store(b.load(spill, typ=wide), total)
        result = t.halved(b.load(total, typ=wide))
        with b.if_else(rounded) as (short, long):
            with short:
                t.store(t.nearest_even(result), out, row, I16)
            with long:
                t.store(result, out, row, F)

    def block(first: Any, count: int) -> None:
        bases = [t.at(w, b.mul(b.add(first, i64(r)), ld), I16) for r in range(count)]
        for r in range(count):
            b.store(t.constant(wide, 0.0), sums[r])
        with t.loop(i64(0), whole, LANES) as k:
            right = t.widen(t.load(x, k, I16, LANES), LANES)
            for r in range(count):
                t.prefetch(t.at(bases[r], b.add(k, i64(_AHEAD)), I16))
                left = t.widen(t.load(bases[r], k, I16, LANES), LANES)
                b.store(t.exact_product_added(b.load(sums[r], typ=wide), left, right), sums[r])
        for r in range(count):
            finish(sums[r], bases[r], b.add(first, i64(r)))

    with t.pieces() as piece:
        start = b.mul(piece, rows)
        stop = t.smaller(b.add(start, rows), M)
        middle = b.sub(stop, b.srem(b.sub(stop, start), i64(together)))
        with t.loop(start, middle, together) as row:
            block(row, together)
        if together > 1:
            with t.loop(middle, stop) as row:
                block(row, 1)
    return "gemv"


class Gemv:
    """``out[M] = w[M, K] @ x[K]``, bound to its arrays, whose content may change between calls.

    Args:
        w: bf16 bits, elements of a row contiguous.
        x: bf16 bits, contiguous.
        out: contiguous; f32 takes the sums as they are, uint16 their bf16 bits (nearest even).
    """

    __slots__ = ("run",)

    def __init__(self, w: U16, x: U16, out: npt.NDArray[Any]) -> None:
        M, K = w.shape
        rows = max(4, _PIECE_BYTES // (2 * max(K, 1)) & ~3)
        arguments = [-(-M // rows), M, K, w.strides[0] // 2, _address(w), _address(x), _address(out), rows]
        arguments.append(int(out.dtype == np.uint16))
        self.run = Call(_library().address["gemv"], arguments, (w, x, out), alone=M * K < _SMALL)

    def __call__(self) -> None:
        """Compute ``out`` from what the arrays hold now."""
        self.run()


# -- matrix times matrix ------------------------------------------------------------------------------------


def _emit_tile(module: Any) -> str:
    """``tile(left, panel, depth, c, ldc, fresh)``: rows by PANEL sums in ``c``, ``depth`` terms more.

    ``left`` is ``[depth, GROUP]``, ``panel`` ``[depth, PANEL]``; the sums start from zero if ``fresh``.
    """
    from fixed_order.emit import F32 as F
    from fixed_order.emit import I1, I64, PTR, Function, i64, vector
    from fixed_order.machine import isa

    lanes, registers = isa().lanes, isa().registers
    rows, across = (GROUP, 3) if registers >= 32 else (GROUP // 2, 3)
    wide = vector(F, lanes)
    t = Function(module, "tile", [PTR, PTR, I64, PTR, I64, I1], private=True)
    b = t.b
    left, panel, depth, c, ldc, fresh = t.arguments
    sums = [t.local(wide) for _ in range(rows * across)]
    with (
        t.loop(i64(0), i64(GROUP), rows, some=True) as row,
        t.loop(i64(0), i64(PANEL), across * lanes, some=True) as at,
    ):
        places = [
            (total, b.add(b.mul(b.add(row, i64(n // across)), ldc), b.add(at, i64(n % across * lanes))))
            for n, total in enumerate(sums)
        ]
        with b.if_else(fresh) as (new, old):
            with new:
                for total, _ in places:
                    b.store(t.constant(wide, 0.0), total)
            with old:
                for total, place in places:
                    b.store(t.load(c, place, F, lanes), total)
        with t.loop(i64(0), depth, some=True) as k:
            source = b.add(b.mul(k, i64(PANEL)), at)
            columns = [t.load(panel, b.add(source, i64(j * lanes)), F, lanes) for j in range(across)]
            base = b.add(b.mul(k, i64(GROUP)), row)
            for r in range(rows):
                value = t.splat(t.load(left, b.add(base, i64(r)), F), lanes)
                for j in range(across):
                    total = sums[r * across + j]
                    b.store(t.exact_product_added(b.load(total, typ=wide), value, columns[j]), total)
        for total, place in places:
            t.store(b.load(total, typ=wide), c, place, F)
    b.ret_void()
    return "tile"


_SHAPE = (
    "M",
    "N",
    "K",
    "low",
    "high",
    "a",
    "lda",
    "b",
    "ldb",
    "c",
    "ldc",
    "add",
    "panels",
    "a_next",
    "b_next",
    "c_next",
)


def _emit_gemm(module: Any, packed: bool) -> str:
    """Product of packed operands (``gemm_packed``), or of plain f32 ones (``gemm_plain``), many at once."""
    from llvmlite import ir

    from fixed_order.emit import F32 as F
    from fixed_order.emit import I16, Task, i64

    name = "gemm_packed" if packed else "gemm_plain"
    t = Task(module, name, _SHAPE)
    b = t.b
    M, N, K, start, stop = (t.argument(n) for n in ("M", "N", "K", "low", "high"))
    lda, ldb, ldc, add, panels = (t.argument(n) for n in ("lda", "ldb", "ldc", "add", "panels"))
    steps = [t.argument(n) for n in ("a_next", "b_next", "c_next")]
    bases = [t.pointer(n) for n in ("a", "b", "c")]
    panel, edge, group = (t.local(ir.ArrayType(F, n)) for n in (DEPTH * PANEL, GROUP * PANEL, DEPTH * GROUP))
    tile = module.globals["tile"]

    def fill_packed(right: Any, first: Any, low: Any, depth: Any) -> None:
        begin = b.mul(b.add(b.mul(first, K), low), i64(PANEL))
        with t.loop(i64(0), b.mul(depth, i64(PANEL)), LANES, some=True) as at:
            bits = t.load(right, b.add(begin, at), I16, LANES)
            t.store(t.widen(bits, LANES), panel, at, F)

    def fill_plain(source: Any, ld: Any, depth: Any, valid: Any, target: Any, width: int) -> None:
        """Copy ``[depth, valid]`` into ``[depth, width]``, zeros behind."""
        with t.loop(i64(0), depth, some=True) as k:
            row, to = t.at(source, b.mul(k, ld), F), t.at(target, b.mul(k, i64(width)), F)
            with b.if_else(b.icmp_signed("==", valid, i64(width))) as (whole, part):
                with whole, t.loop(i64(0), i64(width), GROUP, some=True) as j:
                    t.store(t.load(row, j, F, GROUP), to, j, F)
                with part, t.loop(i64(0), i64(width), some=True) as j:
                    inside = b.icmp_signed("<", j, valid)
                    near = b.select(inside, j, i64(0))
                    t.store(b.select(inside, t.load(row, near, F), ir.Constant(F, 0.0)), to, j, F)

    def copy(source: Any, ld: Any, target: Any, to_ld: Any, rows: Any, columns: Any) -> None:
        with t.loop(i64(0), rows, some=True) as r, t.loop(i64(0), columns, some=True) as j:
            t.store(t.load(source, b.add(b.mul(r, ld), j), F), target, b.add(b.mul(r, to_ld), j), F)

    with t.pieces() as piece:
        matrix, first = b.sdiv(piece, panels), b.srem(piece, panels)
        left, right, c = (
            t.at(base, b.mul(matrix, step), kind)
            for base, step, kind in zip(bases, steps, (F, I16 if packed else F, F), strict=True)
        )
        column = b.mul(first, i64(PANEL))
        wide = t.smaller(b.sub(N, column), i64(PANEL))
        with t.loop(start, stop, DEPTH) as low:
            depth = t.smaller(b.sub(stop, low), i64(DEPTH))
            if packed:
                fill_packed(right, first, low, depth)
            else:
                fill_plain(t.at(right, b.add(b.mul(low, ldb), column), F), ldb, depth, wide, panel, PANEL)
            fresh = b.and_(b.icmp_signed("==", low, start), b.icmp_signed("==", add, i64(0)))
            with t.loop(i64(0), M, GROUP) as row:
                tall = t.smaller(b.sub(M, row), i64(GROUP))
                if packed:
                    mine = t.at(left, b.add(b.mul(row, K), b.mul(low, i64(GROUP))), F)
                else:
                    fill_plain(t.at(left, b.add(b.mul(low, lda), row), F), lda, depth, tall, group, GROUP)
                    mine = group
                target = t.at(c, b.add(b.mul(row, ldc), column), F)
                full = b.and_(b.icmp_signed("==", wide, i64(PANEL)), b.icmp_signed("==", tall, i64(GROUP)))
                with b.if_else(full) as (whole, part):
                    with whole:
                        b.call(tile, [mine, panel, depth, target, ldc, fresh])
                    with part:
                        copy(target, ldc, edge, i64(PANEL), tall, wide)
                        b.call(tile, [mine, panel, depth, edge, i64(PANEL), fresh])
                        copy(edge, i64(PANEL), target, ldc, tall, wide)
    return name


def pack_columns(w: U16) -> U16:
    """``w[K, N]`` as ``[ceil(N / PANEL), K, PANEL]`` with zeros behind the last column."""
    K, N = w.shape
    panels = np.zeros((-(-N // PANEL), K, PANEL), np.uint16)
    for index, panel in enumerate(panels):
        part = w[:, index * PANEL : (index + 1) * PANEL]
        panel[:, : part.shape[1]] = part
    return panels


def pack_rows(a: F32, out: F32) -> None:
    """``a[K, M]`` into ``out[ceil(M / GROUP), K, GROUP]`` with zeros behind the last row of the product."""
    K, M = a.shape
    whole = M // GROUP
    np.copyto(out[:whole], a[:, : whole * GROUP].reshape(K, whole, GROUP).transpose(1, 0, 2))
    if M % GROUP:
        out[whole] = 0.0
        out[whole, :, : M % GROUP] = a[:, whole * GROUP :]


def groups(M: int) -> int:
    """Length of the first dimension of packed rows."""
    return -(-M // GROUP)


class PackedProduct:
    """``out[M, N] = a @ b`` of packed rows and packed columns, into f32 with contiguous rows.

    ``low`` and ``high`` bound the part along K.
    """

    def __init__(
        self, a: F32, panels: U16, out: F32, *, low: int = 0, high: int | None = None, add: bool = False
    ) -> None:
        M, N = out.shape
        count, K = panels.shape[:2]
        arguments = [count, M, N, K, low, K if high is None else high, _address(a), 0, _address(panels), 0]
        arguments += [_address(out), out.strides[0] // 4, int(add), count, 0, 0, 0]
        self.run = Call(
            _library().address["gemm_packed"], arguments, (a, panels, out), alone=M * N * K < _SMALL
        )

    def __call__(self) -> None:
        """Compute ``out`` from what the arrays hold now."""
        self.run()


def gemm(a: F32, b: F32, out: F32, *, add: bool = False) -> None:
    """``out[B, M, N] = a[B, K, M]^T @ b[B, K, N]``, all f32 with contiguous last dimension.

    With ``add`` the running sums start from what ``out`` holds.
    """
    batch, K, M = a.shape
    N = b.shape[2]
    panels = -(-N // PANEL)
    arguments = [
        batch * panels,
        M,
        N,
        K,
        0,
        K,
        _address(a),
        a.strides[1] // 4,
        _address(b),
        b.strides[1] // 4,
    ]
    arguments += [_address(out), out.strides[1] // 4, int(add), panels]
    arguments += [array.strides[0] // 4 for array in (a, b, out)]
    Call(_library().address["gemm_plain"], arguments, (), alone=batch * M * N * K < _SMALL)()


def _address(array: Any) -> int:
    return int(array.ctypes.data)


@lru_cache(maxsize=1)
def _library() -> Any:
    from fixed_order.machine import build

    return build(_emit_gemv, _emit_tile, partial(_emit_gemm, packed=True), partial(_emit_gemm, packed=False))
