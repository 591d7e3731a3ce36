"""Matrix products: block floating point for the matrix units, f32 for the vector units.

Blocks of eight neighbours along K share the exponent E = floor(log2(max |x|)); a mantissa has eight bits
including its sign and the step 2**(E-6), rounded to nearest even; when one leaves -128..127, E is raised by
one and the block rounded anew. Products are summed in f32, in the order of
:mod:`llms.verify.reference.arithmetic.sums` (which one does not matter at published precision).
"""

from __future__ import annotations

from typing import Any

import torch

from llms.verify.reference.arithmetic import sums
from llms.verify.reference.arithmetic.description import LinearArithmetic
from llms.verify.reference.arithmetic.rounding import cast, floor_bf16

BLOCK = 8
_LEAST_EXPONENT = -119
_CHUNK_ELEMENTS = 1 << 22


def power_of_two(exponent: Any) -> Any:
    """2**exponent as f32, exact, for -126 <= exponent <= 127."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def block_quantise(x: Any) -> Any:
    """Quantise f32 ``x[..., L]`` in blocks of eight along the last dimension; returns f32.

    A block that holds a value that is not finite becomes NaN. Raises ValueError when L is no multiple of 8.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"{x.shape[-1]} elements along K are no whole number of blocks of {BLOCK}")
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    peak = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(peak).exponent.clamp_min(_LEAST_EXPONENT + 1) - 1
    step = power_of_two(exponent - 6)
    mantissa = torch.round(blocks / step)
    over = ((mantissa > 127) | (mantissa < -128)).any(-1, keepdim=True)
    if bool(over.any()):
        step = torch.where(over, step * 2, step)
        mantissa = torch.round(blocks / step)
    result = mantissa * step
    if not bool(torch.isfinite(peak).all()):
        result = torch.where(torch.isfinite(peak), result, torch.full_like(result, float("nan")))
    return result.reshape(x.shape)


def whole_blocks(x: Any) -> Any:
    """``x[.., K]`` with zeros behind K up to the next whole block, as padded operands on the device have."""
    odd = -x.shape[-1] % BLOCK
    return torch.nn.functional.pad(x, (0, odd)) if odd else x


def quantised_weight(weight: Any) -> Any:
    """bf16 ``[N, K]`` quantised along K; eight significant bits, so bf16 holds the result exactly.

    The result is ``[N, K']`` with K' in whole blocks.
    """
    weight = whole_blocks(weight)
    result = torch.empty_like(weight)
    rows = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        result[part] = block_quantise(weight[part].float())
    return result


def gemm(x: Any, quantised: Any, how: LinearArithmetic) -> Any:
    """bf16 ``x[M, K]`` times a weight ``[N, K]`` from :func:`quantised_weight`; bf16 ``[M, N]``."""
    left = block_quantise(whole_blocks(x).float())
    if how.method == "direct":
        return _in_steps(left, quantised, how.step)
    product = sums.products(left, quantised)
    return floor_bf16(product) if how.method == "fused-cast" else product.to(torch.bfloat16)


def gemv(x: Any, weight: Any, how: LinearArithmetic) -> Any:
    """bf16 ``x[M, K]`` times bf16 ``weight[N, K]``, row by row; bf16 ``[M, N]``."""
    if how.method == "cascade":
        return _in_steps(x, weight, how.step)
    if how.slices:
        return _in_slices(x, weight, how)
    return sums.products(x, weight).to(torch.bfloat16)


def _in_steps(x: Any, weight: Any, step: int) -> Any:
    """The running sum rounded to bf16 after every ``step`` along K."""
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.bfloat16)
    for at in range(0, weight.shape[1], step):
        product = sums.products(x[:, at : at + step], weight, at, at + step)
        total = (total.float() + product).to(torch.bfloat16)
    return total


def _in_slices(x: Any, weight: Any, how: LinearArithmetic) -> Any:
    """One bf16 product per slice of K, added in order. A last slice may reach past K, into zero padding."""
    if sum(how.slices) < x.shape[-1]:
        raise ValueError(f"slices {how.slices} leave out columns of K = {x.shape[-1]}")
    whole = LinearArithmetic("gemv")
    total: Any = None
    at = 0
    for width in how.slices:
        part = slice(at, at + width)
        product = gemv(x[:, part], weight[:, part], whole)
        total = product if total is None else cast(total.float() + product.float(), how.joined)
        at += width
    return total
