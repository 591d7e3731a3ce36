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
    if op == "flash_attention":
        return _flash_attention(dims, method, tile or {})
    if op not in _MAKERS:
        known = ", ".join(sorted((*_MAKERS, "flash_attention")))
        raise ValueError(f"no harness inputs for operation {op!r}; known: {known}")
    return _MAKERS[op](dims)


def rope_table(rows: int, head_dim: int, theta: float = ROPE_THETA) -> Array:
    """bf16[rows, head_dim]: row r is [cos half | sin half] at position r.

    Angles in f64, their cosine and sine cast to f32, then to bf16.
    """
    half = head_dim // 2
    frequency = 1.0 / theta ** (np.arange(half, dtype=np.float64) * 2.0 / head_dim)
    angles = np.arange(rows, dtype=np.float64)[:, None] * frequency
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return table.astype(np.float32).astype(bfloat16)


def _legacy(seed: int, divisor: float = 1.0) -> Callable[..., Array]:
    """bf16 draws of a shape, by numpy's old generator in f64."""
    rng = np.random.RandomState(seed)
    return lambda *shape: (rng.standard_normal(shape) / divisor).astype(bfloat16)


def _normal(seed: int = 0) -> Callable[..., Array]:
    """bf16 draws of a shape, by numpy's present generator in f32."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int, scale: float = 1.0) -> Array:
        draws = rng.standard_normal(shape, dtype=np.float32)
        return (draws if scale == 1.0 else draws * np.float32(scale)).astype(bfloat16)

    return draw


def _gemm(d: Mapping[str, int]) -> dict[str, Array]:
    draw = _legacy(42, np.sqrt(d["K"]))
    return {"a": draw(d["M"], d["K"]), "b": draw(d["K"], d["N"])}


def _gemv(d: Mapping[str, int]) -> dict[str, Array]:
    draw = _legacy(42, 1 / 4)
    return {"w": draw(d["M"], d["K"]), "x": draw(d["K"])}


def _gemv_add(d: Mapping[str, int]) -> dict[str, Array]:
    draw = _normal()
    w = draw(d["M"], d["K"], scale=d["K"] ** -0.5)
    return {"w": w, "x": draw(d["K"]), "residual": draw(d["M"])}


def _norm_gateup_swiglu(d: Mapping[str, int]) -> dict[str, Array]:
    draw = _normal()
    packed = draw(2, d["emb"])
    return {"packed": packed, "w": draw(2 * d["hidden"], d["emb"], scale=d["emb"] ** -0.5)}


def _rms_norm(d: Mapping[str, int]) -> dict[str, Array]:
    draw = _legacy(0)
    return {"x": draw(d["M"], d["N"]), "w": draw(d["N"])}


def _layer_norm(d: Mapping[str, int]) -> dict[str, Array]:
    draw = _legacy(0)
    return {"x": draw(d["M"], d["N"]), "w": draw(d["N"]), "b": draw(d["N"])}


def _rope(d: Mapping[str, int]) -> dict[str, Array]:
    return {"x": _normal()(d["rows"], d["head_dim"]), "table": rope_table(d["rows"], d["head_dim"])}


def _bias_add(d: Mapping[str, int]) -> dict[str, Array]:
    draw = _normal()
    return {"x": draw(d["rows"], d["n"]), "bias": draw(d["n"])}


def _vectors(*names: str) -> Callable[[Mapping[str, int]], dict[str, Array]]:
    def make(d: Mapping[str, int]) -> dict[str, Array]:
        draw = _normal()
        return {name: draw(d["n"]) for name in names}

    return make


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


_MAKERS: Mapping[str, Callable[[Mapping[str, int]], dict[str, Array]]] = {
    "gemm": _gemm,
    "gemv": _gemv,
    "gemv_add": _gemv_add,
    "norm_gateup_swiglu": _norm_gateup_swiglu,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "eltwise_add": _vectors("a", "b"),
    "bias_add": _bias_add,
    "silu_mul": _vectors("gate", "up"),
    "gelu": _vectors("x"),
}
