"""Harness inputs: generator, seed, order and distribution per kernel.

Taken from the run scripts that produced the published figures (Xilinx/mlir-air e972f2942,
``programming_examples/*/run.py`` and their siblings). With the same numpy stream the figures can be compared
to their last printed digit, so the order of the draws matters as much as the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from ml_dtypes import bfloat16

from llms.verify.contract.records import Array

ROPE_THETA = 500000.0
"""Base of the rotary embedding in the published RoPE harness."""


def make_inputs(
    op: str, dims: Mapping[str, int], *, method: str = "", tile: Mapping[str, int] | None = None
) -> dict[str, Array]:
    """All operands that ``op`` reads, as ``ml_dtypes.bfloat16`` arrays by operand name.

    ``dims`` as in the launch (gemm: M, K, N; rope: rows, head_dim; ...). ``method`` and ``tile`` matter for
    the layout of attention only. Operations without a published harness (bias add, the cascade kernels of
    decode) use ``default_rng(0)`` standard normals, weights scaled by 1/sqrt(K). Raises ValueError for an
    unknown operation.
    """
    make = _MAKERS.get(op)
    if make is None:
        raise ValueError(f"no harness inputs for operation {op!r}; known: {', '.join(sorted(_MAKERS))}")
    return make(dims, method, tile or {})


def rope_table(rows: int, head_dim: int, theta: float = ROPE_THETA) -> Array:
    """bf16[rows, head_dim]: row r is [cos half | sin half] at position r.

    Angles in f64, their cosine and sine cast to f32, then to bf16.
    """
    half = head_dim // 2
    frequency = 1.0 / theta ** (np.arange(half, dtype=np.float64) * 2.0 / head_dim)
    angles = np.arange(rows, dtype=np.float64)[:, None] * frequency
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return table.astype(np.float32).astype(bfloat16)


def _legacy(seed: int) -> np.random.RandomState:
    return np.random.RandomState(seed)


def _gemm(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> dict[str, Array]:
    rng = _legacy(42)
    scale = np.sqrt(d["K"])
    a = (rng.standard_normal((d["M"], d["K"])) / scale).astype(bfloat16)
    b = (rng.standard_normal((d["K"], d["N"])) / scale).astype(bfloat16)
    return {"a": a, "b": b}


def _gemv(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> dict[str, Array]:
    rng = _legacy(42)
    w = (rng.standard_normal((d["M"], d["K"])) * 4).astype(bfloat16)
    x = (rng.standard_normal(d["K"]) * 4).astype(bfloat16)
    return {"w": w, "x": x}


def _gemv_add(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    w = _normal(rng, d["M"], d["K"], scale=d["K"] ** -0.5)
    return {"w": w, "x": _normal(rng, d["K"]), "residual": _normal(rng, d["M"])}


def _norm_gateup_swiglu(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    packed = _normal(rng, 2, d["emb"])
    return {"packed": packed, "w": _normal(rng, 2 * d["hidden"], d["emb"], scale=d["emb"] ** -0.5)}


def _rms_norm(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> dict[str, Array]:
    rng = _legacy(0)
    x = rng.standard_normal((d["M"], d["N"])).astype(bfloat16)
    return {"x": x, "w": rng.standard_normal(d["N"]).astype(bfloat16)}


def _layer_norm(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> dict[str, Array]:
    rng = _legacy(0)
    x = rng.standard_normal((d["M"], d["N"])).astype(bfloat16)
    w = rng.standard_normal(d["N"]).astype(bfloat16)
    return {"x": x, "w": w, "b": rng.standard_normal(d["N"]).astype(bfloat16)}


def _rope(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> dict[str, Array]:
    x = _normal(np.random.default_rng(0), d["rows"], d["head_dim"])
    return {"x": x, "table": rope_table(d["rows"], d["head_dim"])}


def _eltwise_add(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {"a": _normal(rng, d["n"]), "b": _normal(rng, d["n"])}


def _bias_add(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {"x": _normal(rng, d["rows"], d["n"]), "bias": _normal(rng, d["n"])}


def _silu_mul(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {"gate": _normal(rng, d["n"]), "up": _normal(rng, d["n"])}


def _gelu(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> dict[str, Array]:
    return {"x": _normal(np.random.default_rng(0), d["n"])}


def _flash_attention(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(42)
    lq, lk, hd, heads, kv = d["lq"], d["lk"], d["head_dim"], d["q_heads"], d["kv_heads"]
    q, k, v = (
        rng.standard_normal((n, length, hd)).astype(bfloat16)
        for n, length in ((heads, lq), (kv, lk), (kv, lk))
    )
    if method == "seq_first":
        return {name: seq_first(x) for name, x in (("q", q), ("k", k), ("v", v))}
    return {"q": q, "k": k, "v": split_columns(v, tile.get("dv_tile", hd))}


def seq_first(x: Array) -> Array:
    """[heads, length, head_dim] -> [length, heads * head_dim]."""
    return np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(x.shape[1], -1)


def split_columns(x: Array, width: int) -> Array:
    """[heads, length, head_dim] -> [heads * chunks, length, width] with chunks = head_dim / width."""
    heads, length, hd = x.shape
    split = x.reshape(heads, length, hd // width, width).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(split).reshape(-1, length, width)


def _normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    draws = rng.standard_normal(shape, dtype=np.float32)
    return (draws if scale == 1.0 else draws * np.float32(scale)).astype(bfloat16)


_MAKERS: Mapping[str, Callable[[Mapping[str, int], str, Mapping[str, int]], dict[str, Array]]] = {
    "gemm": _gemm,
    "gemv": _gemv,
    "gemv_add": _gemv_add,
    "norm_gateup_swiglu": _norm_gateup_swiglu,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "eltwise_add": _eltwise_add,
    "bias_add": _bias_add,
    "silu_mul": _silu_mul,
    "gelu": _gelu,
    "flash_attention": _flash_attention,
}
