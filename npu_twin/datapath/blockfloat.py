"""Block floating point (bfp16ebs8) as the matrix units of AIE2P use it.

Eight consecutive elements along the contracted dimension share one exponent E = floor(log2(max |x|)). Their
mantissas are 8-bit two's complement with step 2**(E-6), rounded to nearest even. When a rounded mantissa
leaves -128..127, E is raised by one and the block is rounded again; a saturating variant would miss the
four-digit figures that Xilinx/mlir-air e972f2942 publishes for 64x12288x960. A quantised value has at most
eight significant bits, so it is exactly a bf16 again.

Tensors here are torch, with the blocked dimension first: then every pass is contiguous along the other one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from npu_twin.bf16 import U16
from npu_twin.datapath._steps import as_bf16
from npu_twin.datapath.arithmetic import Arithmetic

BLOCK = 8
"""Elements that share an exponent."""

_EXPONENT = 0x7F800000
_LARGEST_BIASED = 254  # of a finite f32
_CHUNK = 1 << 22


def check_blocked(length: int, what: str) -> None:
    """Raise ValueError unless ``length`` is a multiple of the block."""
    if length % BLOCK:
        raise ValueError(
            f"{what} is {length}, but the matrix unit shares exponents among {BLOCK} elements along it; "
            f"pad it to a multiple of {BLOCK}"
        )


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
    top.bitwise_and_(_EXPONENT)
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
    rounded[(exponent == _EXPONENT).unsqueeze(1).expand_as(rounded)] = float("nan")
    blocks.copy_(rounded)


def quantised_rows(bits: U16, choice: Arithmetic) -> Any:
    """bf16 tensor [K, N]: a weight quantised along its first dimension, exactly representable as bf16.

    Half the memory of f32, and widening it for a product costs a few percent of the product.
    """
    source = as_bf16(np.ascontiguousarray(bits))
    if choice.block_bits is None:
        return source.clone()
    K, N = source.shape
    result = torch.empty_like(source)
    rows = max(BLOCK, _CHUNK // N // BLOCK * BLOCK)
    for start in range(0, K, rows):
        part = source[start : start + rows].float()
        quantise_(part, choice)
        result[start : start + rows] = part
    return result


def weight_key(choice: Arithmetic) -> str:
    """Name under which a weight quantised by these choices is kept."""
    return f"bfp16 rows {choice.block_bits} {choice.block_overflow}"
