"""A model's sizes on the device: padded where the kernels need it, and which parts run on the host.

Widths become multiples of 64 (GEMV: K % 64; GEMM: tiles of 16 columns over 4 herd columns; mlir-air kernel
registry), head sizes multiples of 16 (RoPE). Added columns are zero, so they change nothing but the mean
of an RMSNorm: its weight is scaled by sqrt(n / padded) and its eps by n / padded, which makes up for it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import gcd, sqrt
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from .model_config import ModelConfig

Array = np.ndarray[Any, Any]

WIDTH = 64
HEAD = 16
# Attention kernels exist for these head sizes (mlir-air kernel registry); others are attended on the host.
DEVICE_HEAD_DIMS = (64, 128)
# Above it O+FFN does not fit one ELF; 3072, 6144, 8192 do, 8960, 9728, 11008 do not (mlir-air LLM examples).
LARGEST_MERGED_HIDDEN = 8192


# Columns of a GEMV. A core holds x, the rows it works on and its stack in 64 KiB of L1: two rows of bf16 up
# to the first size, one up to the second; one at a time repeats x for every row of a core, 256 times at most.
# More than two GEMVs in one ELF take up to the third. (npu_twin.constraints, rules V4, B2 and B5.)
_COLUMNS_OF_TWO_ROWS = 10688
_COLUMNS_OF_ONE_ROW = 16064
_ROWS_ONE_AT_A_TIME = 2048
_COLUMNS_OF_MANY = 8128


def gemv_slices(rows: int, k: int) -> tuple[slice, ...]:
    """Columns of each GEMV that a product [rows, k] x [k] takes: all at once where a GEMV holds them.

    `k` and all slices are multiples of 64. The partial sums are rounded to bf16 and added, as a GEMV has no
    other output.
    """
    most = _COLUMNS_OF_ONE_ROW if rows <= _ROWS_ONE_AT_A_TIME else _COLUMNS_OF_TWO_ROWS
    count = 1 if k <= most else 2
    if k > 2 * most:
        count = -(-k // _COLUMNS_OF_MANY)
    ends = [k // WIDTH * (number + 1) // count * WIDTH for number in range(count)]
    return tuple(slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False))


def column_slices(config: ModelConfig) -> dict[str, tuple[str, slice]]:
    """Static argument of a decode ELF that is a part of a weight -> that weight and the part's columns."""
    c = device_config(config)
    slices = gemv_slices(c.emb_dim, c.hidden_dim)
    if len(slices) == 1:
        return {}
    return {f"w_down{number}": ("w_down", columns) for number, columns in enumerate(slices)}


@lru_cache(maxsize=64)
def device_config(config: ModelConfig) -> ModelConfig:
    """The configuration the kernels are built for; equal to `config` when nothing needs padding."""
    head_dim = _up(config.head_dim, HEAD)
    step = WIDTH // gcd(WIDTH, head_dim)
    return replace(
        config,
        emb_dim=_up(config.emb_dim, WIDTH),
        hidden_dim=_up(config.hidden_dim, WIDTH),
        head_dim=head_dim,
        n_heads=_up(config.n_heads, step),
        n_kv_heads=_up(config.n_kv_heads, step),
    )


def attends_on_device(config: ModelConfig) -> bool:
    """Whether prefill attention has a device kernel for this head size."""
    return config.head_dim in DEVICE_HEAD_DIMS


def ffn_form(config: ModelConfig) -> str:
    """Which ELFs hold O+FFN: `merged` (one), `head_down` (two) or `split` (one per projection).

    A hidden size that is no multiple of 512 leaves the down projection out of the merged ELF, as the
    published Qwen2.5-0.5B does (4864); sizes above 8192 need an ELF per projection (Qwen2.5-3B).
    """
    hidden = device_config(config).hidden_dim
    if hidden > LARGEST_MERGED_HIDDEN:
        return "split"
    return "merged" if hidden % 512 == 0 else "head_down"


def deviations(config: ModelConfig) -> list[str]:
    """What differs from the plain case, in words for status and reports."""
    padded = device_config(config)
    names = ("emb_dim", "hidden_dim", "head_dim", "n_heads", "n_kv_heads")
    found = [
        f"{name} {getattr(config, name)} padded to {getattr(padded, name)}"
        for name in names
        if getattr(config, name) != getattr(padded, name)
    ]
    slices = len(gemv_slices(padded.emb_dim, padded.hidden_dim))
    if slices > 1:
        found.append(
            f"down projection of decode in {slices} GEMVs whose bf16 results are added: no GEMV holds "
            f"{padded.hidden_dim} columns for {padded.emb_dim} rows"
        )
    if not attends_on_device(config):
        found.append(f"prefill attention on the host: no device kernel for head_dim {config.head_dim}")
    return found


def norm_eps(real: int, padded: int, eps: float) -> float:
    """eps of an RMSNorm over `padded` columns of which `real` are not zero."""
    return eps if real == padded else eps * real / padded


def head_columns(config: ModelConfig, heads: int) -> Array:
    """Padded position of every real column of `heads` heads: each half of a head keeps its half."""
    padded = device_config(config).head_dim
    half, padded_half = config.head_dim // 2, padded // 2
    inside = np.concatenate([np.arange(half), padded_half + np.arange(half)])
    columns: Array = (np.arange(heads)[:, None] * padded + inside[None, :]).reshape(-1)
    return columns


def pad_array(array: Array, shape: tuple[int, ...], rows: Array | None = None) -> Array:
    """Zeros of `shape` with `array` at the given rows (default: the first ones) and the first columns."""
    if array.shape == shape:
        return array
    out = np.zeros(shape, dtype=array.dtype)
    where = slice(array.shape[0]) if rows is None else rows
    out[(where, *map(slice, array.shape[1:]))] = array
    return out


def pad_norm(array: Array, shape: tuple[int, ...], index: Array | None = None) -> Array:
    """Norm weight [n] for padded rows, scaled as the module docstring says."""
    if array.shape == shape:
        return array
    scaled = array.astype(np.float32) * np.float32(sqrt(array.shape[0] / shape[0]))
    return pad_array(scaled.astype(bfloat16), shape, index)


def pad_table(table: Array, head_dim: int) -> Array:
    """RoPE table [length, d] -> [length, head_dim]: each half keeps its half."""
    if table.shape[1] == head_dim:
        return table
    half = table.shape[1] // 2
    out = np.zeros((table.shape[0], head_dim), dtype=table.dtype)
    out[:, :half] = table[:, :half]
    out[:, head_dim // 2 : head_dim // 2 + half] = table[:, half:]
    return out


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def real_heads(array: Array, heads: int, config: ModelConfig) -> Array:
    """[n, padded width] -> [n, heads, head_dim]: the heads the model has, without padding."""
    c = device_config(config)
    split = array.reshape(array.shape[0], -1, c.head_dim)[:, :heads]
    if c.head_dim == config.head_dim:
        return split
    half, padded_half = config.head_dim // 2, c.head_dim // 2
    return np.concatenate([split[..., :half], split[..., padded_half : padded_half + half]], axis=-1)


def padded_heads(array: Array, config: ModelConfig) -> Array:
    """Attention output [n, n_heads * head_dim] -> [n, padded query width], zeros behind all heads.

    Padded heads are attended on the host, so nothing needs the padding inside each head any more; behind all
    of them it leaves the blocks of the output projection where they are without padding.
    """
    return pad_array(array, (array.shape[0], device_config(config).q_dim))
