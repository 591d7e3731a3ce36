"""bfloat16 as raw bits: conversion and the two rounding modes of an AIE2P core.

A bf16 value is the upper half of an f32, so widening is a shift and rounding is integer arithmetic on the
bits. An accumulator-to-bf16 move rounds with the mode register of the core (Xilinx/mlir-aie issue 2983, pull
requests 2910 and 3587): ``floor`` (toward minus infinity) is the reset value and stays in force on cores that
only run float code, ``nearest_even`` is set by kernels with a matrix product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]

FLOOR = "floor"
NEAREST_EVEN = "nearest_even"
ROUNDINGS = (FLOOR, NEAREST_EVEN)

_QUIET_NAN = np.uint16(0x7FC0)


def widen(bits: npt.ArrayLike) -> F32:
    """f32 array of the values whose bf16 bits are given (uint16, any shape). Exact."""
    return np.left_shift(np.asarray(bits, dtype=np.uint16), 16, dtype=np.uint32).view(np.float32)


def nearest_even(values: npt.ArrayLike) -> U16:
    """bf16 bits of f32 values, rounded to nearest, ties to even. Overflow gives infinity, a NaN stays NaN."""
    x = np.asarray(values, dtype=np.float32)
    u = x.view(np.uint32)
    half = ((u >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    bits = ((u + half) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), _nan_bits(u), bits)


def floor(values: npt.ArrayLike) -> U16:
    """bf16 bits of the largest bf16 that is not above each f32 value. A NaN stays NaN.

    A positive value never becomes infinite; a finite value below the smallest bf16 becomes minus infinity.
    """
    x = np.asarray(values, dtype=np.float32)
    u = x.view(np.uint32)
    away = (u >> np.uint32(31)) * np.uint32(0xFFFF)
    bits = ((u + away) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), _nan_bits(u), bits)


def _nan_bits(u: npt.NDArray[np.uint32]) -> U16:
    return (u >> np.uint32(16)).astype(np.uint16) | _QUIET_NAN


def to_bits(values: npt.ArrayLike, rounding: str) -> U16:
    """bf16 bits of f32 values in the given rounding mode (``floor`` or ``nearest_even``).

    Raises ValueError for another mode.
    """
    if rounding == NEAREST_EVEN:
        return nearest_even(values)
    if rounding == FLOOR:
        return floor(values)
    raise ValueError(f"rounding {rounding!r} is not one of {', '.join(ROUNDINGS)}")


def round_f32(values: npt.ArrayLike, rounding: str) -> F32:
    """f32 values rounded to bf16 precision, returned as f32."""
    return widen(to_bits(values, rounding))


def host_to_bits(array: npt.NDArray[Any]) -> U16:
    """Bits of a host array: ``ml_dtypes.bfloat16`` or already ``uint16``. Raises TypeError otherwise."""
    if array.dtype == np.uint16:
        return np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return np.ascontiguousarray(array).view(np.uint16)
    raise TypeError(f"expected bfloat16 (ml_dtypes) or its uint16 bits, not {array.dtype}")


def bits_to_host(bits: U16) -> npt.NDArray[Any]:
    """``ml_dtypes.bfloat16`` array with a copy of the given bits."""
    from ml_dtypes import bfloat16

    return bits.copy().view(bfloat16)
