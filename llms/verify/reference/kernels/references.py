"""What each kernel must compute: plain float32 numpy on the bf16 inputs, rounded once to the output type.

No block formats, no staged rounding, no tables. These functions share no code with the twin, so an agreement
between the two means something. Products of matrices are summed in float64: the order of a float32 sum is
that of the BLAS at hand, which decides single roundings to bf16 and with them the figures of a GEMV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

from llms.verify.contract.records import Array

F32 = npt.NDArray[np.float32]

MASKED = np.float32(-1e9)
"""Score of a masked key in the attention reference."""

QUERY_BLOCK = 1024
"""Queries that the attention reference handles at a time, to bound its memory at long sequences."""


def gemm(a: F32, b: F32) -> F32:
    """a[M, K] @ b[K, N]."""
    return np.asarray(a.astype(np.float64) @ b, np.float32)


def gemv(w: F32, x: F32) -> F32:
    """w[M, K] @ x[K]."""
    return np.asarray(w.astype(np.float64) @ x, np.float32)


def gemv_add(w: F32, x: F32, residual: F32) -> F32:
    """residual[M] + w[M, K] @ x[K]."""
    return gemv(w, x) + residual


def rms_norm(x: F32, w: F32, eps: float = 1e-5) -> F32:
    """x * w / sqrt(mean(x**2) + eps) along the last axis."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean_square + np.float32(eps)) * w, np.float32)


def layer_norm(x: F32, w: F32, b: F32, eps: float = 1e-5) -> F32:
    """(x - mean) / sqrt(var + eps) * w + b along the last axis."""
    centred = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
    variance = np.mean(centred * centred, axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(centred / np.sqrt(variance + np.float32(eps)) * w + b, np.float32)


def rope(x: F32, table: F32, interleaved: bool = False) -> F32:
    """Rotate the pairs of x[rows, head_dim] by the angles of table rows [cos half | sin half].

    Pairs are (i, i + half), or (2i, 2i + 1) when ``interleaved``.
    """
    half = x.shape[1] // 2
    cos, sin = table[:, :half], table[:, half:]
    first, second = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
    turned = (first * cos - second * sin, first * sin + second * cos)
    if interleaved:
        return np.stack(turned, axis=2).reshape(x.shape)
    return np.concatenate(turned, axis=1)


def silu(x: F32) -> F32:
    """x * sigmoid(x)."""
    with np.errstate(over="ignore"):
        return np.asarray(x / (np.float32(1) + np.exp(-x)), np.float32)


def silu_mul(gate: F32, up: F32) -> F32:
    """silu(gate) * up."""
    return silu(gate) * up


def gelu(x: F32) -> F32:
    """GELU in its tanh form."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (np.float32(1) + np.tanh(inner)), np.float32)


def flash_attention(q: F32, k: F32, v: F32, causal: bool) -> F32:
    """softmax(q k^T / sqrt(head_dim)) v; q[heads, lq, hd], k/v[kv_heads, lk, hd] -> [heads, lq, hd].

    Query head h uses K/V head h // (heads / kv_heads).
    """
    group = q.shape[0] // k.shape[0]
    scale = np.float32(np.sqrt(q.shape[2]))
    out = np.empty(q.shape, np.float32)
    for head in range(q.shape[0]):
        for start in range(0, q.shape[1], QUERY_BLOCK):
            rows = slice(start, start + QUERY_BLOCK)
            # Keys after the last query of the block would get exp(-1e9) = 0 each; leave them out.
            keys = slice(0, rows.stop if causal else None)
            score = q[head, rows] @ k[head // group, keys].T / scale
            if causal:
                late = np.arange(score.shape[1]) > np.arange(start, start + score.shape[0])[:, None]
                score[late] = MASKED
            score -= score.max(axis=1, keepdims=True)
            np.exp(score, out=score)
            score /= score.sum(axis=1, keepdims=True)
            out[head, rows] = score @ v[head // group, keys]
    return out


def norm_gateup_swiglu(packed: F32, w: F32, eps: float = 1e-5) -> F32:
    """silu(gate) * up with gate/up rows interleaved in w and the RMS norm of packed[0] weighted by
    packed[1].
    """
    both = gemv(w, rms_norm(packed[0], packed[1], eps))
    return silu_mul(both[0::2], both[1::2])


def reference_output(
    op: str,
    inputs: Mapping[str, Array],
    *,
    dims: Mapping[str, int],
    method: str = "",
    attrs: Mapping[str, Any] | None = None,
    out_dtype: str = "bf16",
) -> F32:
    """Reference of ``op`` in the shape of its ``out`` operand: f32, or rounded to bf16 and widened again.

    ``inputs`` by operand name, bf16 or f32. ``attrs``: ``eps`` of norms, ``causal`` of attention. Raises
    ValueError for an unknown operation.
    """
    compute = _OPS.get(op)
    if compute is None:
        raise ValueError(f"no reference for operation {op!r}; known: {', '.join(sorted(_OPS))}")
    wide = {name: np.asarray(x).astype(np.float32) for name, x in inputs.items()}
    result = compute(wide, dims, method, attrs or {})
    return result if out_dtype == "f32" else result.astype(bfloat16).astype(np.float32)


def _attention(x: Mapping[str, F32], d: Mapping[str, int], method: str, attrs: Mapping[str, Any]) -> F32:
    lq, lk, hd, heads, kv = d["lq"], d["lk"], d["head_dim"], d["q_heads"], d["kv_heads"]
    causal = bool(attrs.get("causal", False))
    if method == "seq_first":
        q, k, v = (
            np.ascontiguousarray(x[name].reshape(length, n, hd).transpose(1, 0, 2))
            for name, length, n in (("q", lq, heads), ("k", lk, kv), ("v", lk, kv))
        )
        out = flash_attention(q, k, v, causal)
        return np.ascontiguousarray(out.transpose(1, 0, 2)).reshape(lq, heads * hd)
    width = x["v"].shape[2]
    v = x["v"].reshape(kv, hd // width, lk, width).transpose(0, 2, 1, 3).reshape(kv, lk, hd)
    out = flash_attention(x["q"], x["k"], np.ascontiguousarray(v), causal)
    split = out.reshape(heads, lq, hd // width, width).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(split).reshape(-1, lq, width)


_Reference = Callable[[Mapping[str, F32], Mapping[str, int], str, Mapping[str, Any]], F32]

_OPS: Mapping[str, _Reference] = {
    "gemm": lambda x, d, m, a: gemm(x["a"], x["b"]),
    "gemv": lambda x, d, m, a: gemv(x["w"], x["x"]),
    "gemv_add": lambda x, d, m, a: gemv_add(x["w"], x["x"], x["residual"]),
    "norm_gateup_swiglu": lambda x, d, m, a: norm_gateup_swiglu(x["packed"], x["w"], a.get("eps", 1e-5)),
    "rms_norm": lambda x, d, m, a: rms_norm(x["x"], x["w"], a.get("eps", 1e-5)),
    "layer_norm": lambda x, d, m, a: layer_norm(x["x"], x["w"], x["b"], a.get("eps", 1e-5)),
    "rope": lambda x, d, m, a: rope(x["x"], x["table"], interleaved=m == "interleaved"),
    "eltwise_add": lambda x, d, m, a: x["a"] + x["b"],
    "bias_add": lambda x, d, m, a: x["x"] + x["bias"],
    "silu_mul": lambda x, d, m, a: silu_mul(x["gate"], x["up"]),
    "gelu": lambda x, d, m, a: gelu(x["x"]),
    "flash_attention": _attention,
}
