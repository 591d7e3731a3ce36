"""RoPE tables of a model: one row per position, [cos half | sin half], bf16."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from .model_config import ModelConfig

Array = np.ndarray[Any, Any]


def inverse_frequencies(config: ModelConfig) -> Array:
    """Inverse frequencies [head_dim / 2], float64, with the scaling the configuration asks for.

    Exponent, power and reciprocal are rounded to float32 as in modeling_rope_utils.py of transformers, else
    heads of 24, 48, 80 or 96 get angles that are a step of the bf16 table off at some positions. `linear`
    divides all of them by the factor. `llama3` keeps wavelengths below original/high_freq_factor, divides
    those above original/low_freq_factor, and blends in between (Llama 3.1 reference code).
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    with localcontext() as digits:
        digits.prec = 40  # a library's power is a step off on one CPU or another
        powers = [float(Decimal(config.rope_theta) ** Decimal(e)) for e in exponent.tolist()]
    power = np.array(powers).astype(np.float32)
    base = (np.float32(1.0) / power).astype(np.float64)
    scaling = config.rope_scaling
    if scaling.kind == "default":
        return base
    if scaling.kind == "linear":
        return base / scaling.factor
    wavelength = 2.0 * math.pi / base
    ratio = scaling.original_max_position / wavelength
    blend = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return base * ((1.0 - blend) / scaling.factor + blend)


def rope_table(config: ModelConfig, length: int) -> Array:
    """Table [length, head_dim] bf16; angles in float64, cast straight to bf16."""
    angles = np.arange(length, dtype=np.float64)[:, None] * inverse_frequencies(config)[None, :]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(bfloat16)


def tile_per_head(table: Array, heads: int) -> Array:
    """Repeat every position's row once per head: [length, d] -> [length * heads, d]."""
    return np.repeat(table, heads, axis=0)
