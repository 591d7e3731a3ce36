"""Leaf kernels: specs with the tile the registry holds for their shape.

Every function raises `kernel_registry.registry_lookup.UnmeasuredShape` when the registry has no
row, naming the command that adds it: a tile is never guessed.
"""

from __future__ import annotations

from typing import Any

from kernel_registry import registry_lookup as registry

from .specs import KernelSpec, Scalar


def _spec(
    op: str, dims: dict[str, int], found: Any, attrs: dict[str, Scalar] | None = None, **kw: Any
) -> KernelSpec:
    return KernelSpec.make(
        op, dims, found.method, found.tile, found.herd, {**found.attrs, **(attrs or {})}, **kw
    )


def gemm(M: int, K: int, N: int, *, output_dtype: str = "bf16", precision: str = "high") -> KernelSpec:
    """[M, K] x [K, N] -> [M, N], bf16 in, f32 accumulation in tier `high`."""
    found = registry.gemm_config(M, K, N, output_dtype=output_dtype, precision=precision)
    return _spec("gemm", {"M": M, "K": K, "N": N}, found, dtype_out=output_dtype)


def gemv(M: int, K: int) -> KernelSpec:
    """[M, K] x [K] -> [M], bf16, one rounding."""
    return _spec("gemv", {"M": M, "K": K}, registry.gemv_config(M, K))


def rms_norm(M: int, N: int, eps: float) -> KernelSpec:
    """Weighted RMSNorm of M rows of length N, sum of squares in f32, eps from the model's config."""
    return _spec("rms_norm", {"M": M, "N": N}, registry.rms_norm_config(M, N), {"eps": eps})


def rope(rows: int, head_dim: int) -> KernelSpec:
    """Half-split rotary embedding, one row per head and position."""
    return _spec("rope", {"rows": rows, "head_dim": head_dim}, registry.rope_config(rows, head_dim))


def flash_attention(seq_len: int, head_dim: int, q_heads: int, kv_heads: int) -> KernelSpec:
    """Causal attention of `seq_len` queries over as many keys, GQA by head groups."""
    found = registry.flash_attention_config(seq_len, seq_len, head_dim, q_heads, kv_heads, True)
    dims = {"lq": seq_len, "lk": seq_len, "head_dim": head_dim, "q_heads": q_heads, "kv_heads": kv_heads}
    return _spec("flash_attention", dims, found, {"causal": True})


def eltwise_add(n: int) -> KernelSpec:
    """Sum of two vectors of n elements."""
    return _spec("eltwise_add", {"n": n}, registry.eltwise_add_config(n))


def bias_add(rows: int, n: int) -> KernelSpec:
    """Add one row of n elements to every row."""
    return _spec("bias_add", {"rows": rows, "n": n}, registry.bias_add_config(rows, n))


def silu_mul(n: int) -> KernelSpec:
    """silu(gate) * up over n elements."""
    return _spec("silu_mul", {"n": n}, registry.silu_mul_config(n))
