"""Functions of one bf16 value that the kernels evaluate by hardware tables or short float chains.

A bf16 operand has 65,536 values, so each such function is tabulated once per process and applied by lookup:
the values are those of the step-by-step chain, and the cost does not depend on it.

The content of the device's own tables is not public. The surrogates here have one free parameter in all (the
tanh grid) and reproduce the error figures of the kernel registry of Xilinx/mlir-air e972f2942.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from npu_twin.bf16 import F32, U16, nearest_even, round_f32, to_bits, widen

TANH_GRID = 2.0**-4.25
"""Grid to which the tanh table rounds its argument. Fitted on the published SiLU figure (1.024e-2); the
published GELU figure (8.41e-3) is the check."""

EXP2_FRACTION_BITS = 9
"""Fraction bits that survive of the argument of the exponential unit."""


def all_values() -> F32:
    """f32[65536]: the bf16 value of every bit pattern, in order of the patterns."""
    return widen(np.arange(0x10000, dtype=np.uint16))


def tanh_bf16(x: F32, mode: str) -> F32:
    """tanh as the core's table gives it (``hw``) or correctly rounded (``exact``); bf16 values as f32."""
    wide = x.astype(np.float64)
    if mode == "hw":
        wide = np.rint(wide / TANH_GRID) * TANH_GRID
    return widen(nearest_even(np.tanh(wide).astype(np.float32)))


@lru_cache(maxsize=8)
def silu_table(rounding: str, tanh: str) -> F32:
    """f32[65536]: g * sigmoid(g) for every bf16 g, in the steps of the SiLU-and-Mul kernel.

    sigmoid(g) = (1 + tanh(g/2)) / 2; the halvings are exact, the sum and the product round to bf16.
    """
    with np.errstate(all="ignore"):
        g = all_values()
        t = tanh_bf16(g * np.float32(0.5), tanh)
        s = round_f32(np.float32(1) + t, rounding) * np.float32(0.5)
        return round_f32(g * s, rounding)


@lru_cache(maxsize=8)
def gelu_table(rounding: str, tanh: str) -> U16:
    """uint16[65536]: bits of GELU (tanh form) for every bf16 x, each step of the chain rounded to bf16."""
    with np.errstate(all="ignore"):
        x = all_values()
        cubic = widen(nearest_even(np.float32(0.044715)))
        scale = widen(nearest_even(np.float32(np.sqrt(2 / np.pi))))
        x2 = round_f32(x * x, rounding)
        x3 = round_f32(x2 * x, rounding)
        c = round_f32(cubic * x3, rounding)
        z = round_f32(x + c, rounding)
        z = round_f32(scale * z, rounding)
        q = round_f32(tanh_bf16(z, tanh) + np.float32(1), rounding)
        return to_bits((x * np.float32(0.5)) * q, rounding)


@lru_cache(maxsize=16)
def exp2_table(scale: float, mode: str) -> F32:
    """f32[65536]: 2**(d * scale) for every bf16 d, as bf16 values; ``scale`` is multiplied in f32.

    ``hw``: the exponent field is the integer part of the argument and the mantissa is its fraction, taken
    linearly: 2**i * (1 + f) instead of 2**(i + f), up to 6.1 % too large (AMD's public AIE-ML v2 intrinsics
    guide describes the unit). Results below the normal range are zero.
    """
    with np.errstate(all="ignore"):
        d = all_values()
        x = (d * np.float32(scale)).astype(np.float64)
        if mode == "exact":
            table = widen(nearest_even(np.exp2(x).astype(np.float32)))
        else:
            steps = np.rint(np.ldexp(np.clip(x, -1000, 1000), EXP2_FRACTION_BITS))
            bits = np.floor(np.ldexp(steps, 7 - EXP2_FRACTION_BITS)) + (127 << 7)
            bits = np.where(bits < 1 << 7, 0, np.minimum(bits, 0x7F80))
            table = widen(np.nan_to_num(bits).astype(np.uint16))
        table[np.isnan(d)] = np.nan
        return table
