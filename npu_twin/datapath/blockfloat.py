"""Block floating point (bfp16ebs8) as the matrix units of AIE2P use it.

Eight consecutive elements along the contracted dimension share one exponent E = floor(log2(max |x|)). Their
mantissas are 8-bit two's complement with step 2**(E-6), rounded to nearest even. When a rounded mantissa
leaves -128..127, E is raised by one and the block is rounded again; a saturating variant would miss the
four-digit figures that Xilinx/mlir-air e972f2942 publishes for 64x12288x960. A quantised value has at most
eight significant bits, so it is exactly a bf16 again.

Tensors here are torch, with the blocked dimension first: then every pass is contiguous along the other one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fixed_order.products import GROUP, pack_rows
from fixed_order.threads import Call
from npu_twin.bf16 import F32, U16
from npu_twin.datapath._steps import as_bf16
from npu_twin.datapath.arithmetic import Arithmetic

BLOCK = 8
"""Elements that share an exponent."""

EXPONENT = 0x7F800000
"""Exponent field of f32."""

_LARGEST_BIASED = 254  # of a finite f32
_CHUNK = 1 << 22
_ALONE = 1 << 16


def check_blocked(length: int, what: str) -> None:
    """Raise ValueError unless ``length`` is a multiple of the block."""
    if length % BLOCK:
        raise ValueError(
            f"{what} is {length}, but the matrix unit shares exponents among {BLOCK} elements along it; "
            f"pad it to a multiple of {BLOCK}"
        )


def block_constants(choice: Arithmetic) -> tuple[int, int, int] | None:
    """What a compiled pass needs to quantise a block: what is added to its largest magnitude, and to the
    exponent for the rounding constant, and the largest exponent for which that works.

    None: nothing is quantised, or blocks saturate, which :func:`quantise_` does.
    """
    bits = choice.block_bits
    if bits is None or choice.block_overflow != "raise":
        return None
    return 1 << (24 - bits), (25 - bits) << 23, (_LARGEST_BIASED - (25 - bits)) << 23


def quantise_(x: Any, choice: Arithmetic, positive: bool = False) -> None:
    """Quantise a contiguous f32 tensor [L, C] of bf16 values in place, blocks along the first dimension.

    ``positive`` promises that no element is negative, which saves a pass. A block with an infinity becomes
    NaN; a NaN stays where it is.
    """
    bits = choice.block_bits
    if bits is None:
        return
    blocks = x.view(x.shape[0] // BLOCK, BLOCK, x.shape[1])
    # Largest positive and largest negative magnitude, as bit patterns. A positive maximum that would round
    # to 2**(bits-1) carries into the exponent when half a mantissa step is added; -2**(bits-1) exists.
    top = torch.amax(blocks, 1).view(torch.int32)
    if choice.block_overflow == "raise":
        top.add_(1 << (24 - bits))
    if not positive:
        torch.maximum(top, torch.amin(blocks, 1).neg_().view(torch.int32), out=top)
    top.bitwise_and_(EXPONENT)
    if top.numel() and int(top.max()) > (_LARGEST_BIASED - (25 - bits)) << 23:
        _quantise_wide_(blocks, top, bits, choice.block_overflow)
        return
    # Adding and subtracting 1.5 * 2**(23+e) rounds to a multiple of 2**e, to nearest even, in f32 arithmetic.
    magic = top.add((25 - bits) << 23).bitwise_or_(0x400000).view(torch.float32).unsqueeze(1)
    blocks.add_(magic).sub_(magic)
    if choice.block_overflow == "saturate":
        limit = 2.0 - 2.0 ** (2 - bits)
        torch.minimum(blocks, top.view(torch.float32).mul(limit).unsqueeze(1), out=blocks)


def _quantise_wide_(blocks: Any, exponent: Any, bits: int, overflow: str) -> None:
    """The same in double precision, for values whose rounding constant would leave the f32 range."""
    wide = blocks.double()
    step = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), (exponent >> 23) - (127 + bits - 2))
    step = step.unsqueeze(1)
    rounded = torch.round(wide / step)
    if overflow == "saturate":
        rounded.clamp_(max=2 ** (bits - 1) - 1)
    rounded.mul_(step)
    rounded[(exponent == EXPONENT).unsqueeze(1).expand_as(rounded)] = float("nan")
    blocks.copy_(rounded)


def quantised_columns(bits: U16, choice: Arithmetic) -> U16:
    """Bits [K, N] of a weight quantised along its first dimension, exactly representable as bf16.

    Half the memory of f32, and widening it for a product costs a few percent of the product.
    """
    source = as_bf16(np.ascontiguousarray(bits))
    if choice.block_bits is None:
        return bits.copy()
    K, N = source.shape
    result = np.empty((K, N), np.uint16)
    target = as_bf16(result)
    rows = max(BLOCK, _CHUNK // N // BLOCK * BLOCK)
    for start in range(0, K, rows):
        part = source[start : start + rows].float()
        quantise_(part, choice)
        target[start : start + rows] = part
    return result


def quantised_rows(bits: U16, choice: Arithmetic, out: F32) -> None:
    """Bits [M, K] quantised along K, into the packed form [groups(M), K, GROUP] of the left factor."""
    M, K = bits.shape
    constants = block_constants(choice)
    if constants is not None:
        slots = [out.shape[0], M, K, bits.strides[0] // 2, bits.ctypes.data, out.ctypes.data]
        slots += [*constants, 0]
        call = Call(_library().address["quantise_rows"], slots, (bits, out), alone=M * K < _ALONE)
        call()
        if not call.slots[-1]:
            return
    wide = torch.empty(K, M)
    wide.copy_(as_bf16(bits).t())
    quantise_(wide, choice)
    pack_rows(wide.numpy(), out)


def _emit_quantise_rows(module: Any) -> str:
    """:func:`quantise_` and :func:`fixed_order.products.pack_rows` in one pass, 8 rows by 8 along K.

    Slot ``wide`` becomes 1 when a block needs :func:`_quantise_wide_`; the output means nothing then.
    """
    from llvmlite import ir

    from fixed_order.emit import F32 as F
    from fixed_order.emit import I16, I32, I64, Task, i64, vector

    names = ("M", "K", "ld", "a", "out", "raise", "magic", "limit", "wide")
    t = Task(module, "quantise_rows", names)
    b = t.b
    M, K, ld = (t.argument(name) for name in ("M", "K", "ld"))
    a, out = t.pointer("a"), t.pointer("out")
    short, whole, wide = (vector(kind, BLOCK) for kind in (I16, I32, F))
    raised, magic, limit = (
        t.splat(b.trunc(t.argument(name), I32), BLOCK) for name in ("raise", "magic", "limit")
    )
    nothing = t.local(short)
    b.store(t.constant(short, 0), nothing)

    def larger(x: Any, y: Any) -> Any:
        return b.select(b.icmp_signed(">", x, y), x, y)

    def largest(values: list[Any]) -> Any:
        while len(values) > 1:
            values = [larger(x, y) for x, y in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    with t.pieces() as group:
        first = b.mul(group, i64(GROUP))
        rows = [b.add(first, i64(r)) for r in range(GROUP)]
        inside = [b.icmp_signed("<", row, M) for row in rows]
        target = t.at(out, b.mul(first, K), F)
        with t.loop(i64(0), K, BLOCK) as k:
            lines = []
            for row, here in zip(rows, inside, strict=True):
                address = b.select(here, t.at(a, b.add(b.mul(row, ld), k), I16), nothing)
                lines.append(b.load(address, typ=short, align=2))
            bits = [b.shl(b.zext(column, whole), t.constant(whole, 16)) for column in _transposed(t, lines)]
            top = b.add(largest(bits), raised)
            sign = t.constant(whole, -(1 << 31))
            top = larger(top, largest([b.xor(x, sign) for x in bits]))
            top = b.and_(top, t.constant(whole, EXPONENT))
            over = b.icmp_signed(">", top, limit)
            with b.if_then(
                b.icmp_unsigned("!=", b.bitcast(over, ir.IntType(BLOCK)), ir.Constant(ir.IntType(BLOCK), 0)),
                likely=False,
            ):
                slot = t.at(t.arguments[0], i64(t.names.index("wide")), I64)
                b.store(i64(1), slot)
            number = b.bitcast(b.or_(b.add(top, magic), t.constant(whole, 0x400000)), wide)
            for j, x in enumerate(bits):
                value = b.fsub(b.fadd(b.bitcast(x, wide), number), number)
                t.store(value, target, b.mul(b.add(k, i64(j)), i64(GROUP)), F)
    return "quantise_rows"


def _transposed(t: Any, lines: list[Any]) -> list[Any]:
    """Columns of a matrix of 8 by 8 whose lines are given as vectors."""
    from llvmlite import ir

    from fixed_order.emit import I32, vector

    order = ir.Constant(vector(I32, 8), [0, 8, 1, 9, 2, 10, 3, 11])
    other = ir.Constant(vector(I32, 8), [4, 12, 5, 13, 6, 14, 7, 15])
    for _ in range(3):  # each round interleaves line i with line i + 4
        pairs = list(zip(lines[:4], lines[4:], strict=True))
        lines = [t.b.shuffle_vector(x, y, mask) for x, y in pairs for mask in (order, other)]
    return lines


@lru_cache(maxsize=1)
def _library() -> Any:
    from fixed_order.machine import build

    return build(_emit_quantise_rows)


def weight_key(choice: Arithmetic) -> str:
    """Name under which a weight quantised by these choices is kept."""
    return f"bfp16 rows {choice.block_bits} {choice.block_overflow}"
