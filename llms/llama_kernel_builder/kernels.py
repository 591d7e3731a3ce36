"""Leaf kernels: specs with the tile the registry holds for their shape.

Every function raises `kernel_registry.registry_lookup.UnmeasuredShape` when the registry has no
row, naming the command that adds it: a tile is never guessed. Inside `recording()` the registry is not
asked; the shapes that would be are collected instead, so that a sweep can add them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import kernel_registry.registry_lookup as registry

from .specs import KernelSpec, Scalar


@dataclass(frozen=True)
class Requirement:
    """One (kernel, shape) a model needs. `shape` is in the registry's order of dimensions."""

    op: str
    shape: tuple[int, ...]
    output_dtype: str = "bf16"
    precision: str = "high"
    causal: bool = False

    def __str__(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.shape))}"


@dataclass
class _Unknown:
    """Stands for a configuration while shapes are collected; good for shapes, not for compilation."""

    method: str
    tile: dict[str, int]
    herd: tuple[int, int]
    attrs: dict[str, Scalar]


_recorded: dict[Requirement, None] | None = None


@contextmanager
def recording() -> Iterator[dict[Requirement, None]]:
    """Collect the requirements of everything that is built inside, in order, each once."""
    global _recorded
    before, _recorded = _recorded, {}
    try:
        yield _recorded
    finally:
        _recorded = before


def _find(method: str, requirement: Requirement, lookup: Any, **options: Any) -> Any:
    if _recorded is None:
        return lookup(*requirement.shape, **options)
    _recorded[requirement] = None
    return _Unknown(method, {}, (1, 1), {})


def _spec(
    op: str, dims: dict[str, int], found: Any, attrs: dict[str, Scalar] | None = None, **kw: Any
) -> KernelSpec:
    return KernelSpec.make(
        op, dims, found.method, found.tile, found.herd, {**found.attrs, **(attrs or {})}, **kw
    )


def gemm(M: int, K: int, N: int, *, output_dtype: str = "bf16", precision: str = "high") -> KernelSpec:
    """[M, K] x [K, N] -> [M, N], bf16 in, f32 accumulation in tier `high`."""
    need = Requirement("gemm", (M, K, N), output_dtype, precision)
    options = {"output_dtype": output_dtype, "precision": precision}
    found = _find("drain", need, registry.gemm_config, **options)
    return _spec("gemm", {"M": M, "K": K, "N": N}, found, dtype_out=output_dtype)


def gemv(M: int, K: int) -> KernelSpec:
    """[M, K] x [K] -> [M], bf16, one rounding."""
    found = _find("external", Requirement("gemv", (M, K)), registry.gemv_config)
    return _spec("gemv", {"M": M, "K": K}, found)


def rms_norm(M: int, N: int, eps: float) -> KernelSpec:
    """Weighted RMSNorm of M rows of length N, sum of squares in f32, eps from the model's config."""
    found = _find("weighted", Requirement("rms_norm", (M, N)), registry.rms_norm_config)
    return _spec("rms_norm", {"M": M, "N": N}, found, {"eps": eps})


def rope(rows: int, head_dim: int) -> KernelSpec:
    """Half-split rotary embedding, one row per head and position."""
    found = _find("half_split", Requirement("rope", (rows, head_dim)), registry.rope_config)
    return _spec("rope", {"rows": rows, "head_dim": head_dim}, found)


def flash_attention(seq_len: int, head_dim: int, q_heads: int, kv_heads: int) -> KernelSpec:
    """Causal attention of `seq_len` queries over as many keys, GQA by head groups."""
    need = Requirement("flash_attention", (seq_len, seq_len, head_dim, q_heads, kv_heads), causal=True)
    method = "seq_first" if head_dim <= 64 else "head_first"
    found = _find(method, need, registry.flash_attention_config, causal=True)
    dims = {"lq": seq_len, "lk": seq_len, "head_dim": head_dim, "q_heads": q_heads, "kv_heads": kv_heads}
    return _spec("flash_attention", dims, found, {"causal": True})


def eltwise_add(n: int) -> KernelSpec:
    """Sum of two vectors of n elements."""
    found = _find("default", Requirement("eltwise_add", (n,)), registry.eltwise_add_config)
    return _spec("eltwise_add", {"n": n}, found)


def bias_add(rows: int, n: int) -> KernelSpec:
    """Add one row of n elements to every row."""
    found = _find("default", Requirement("bias_add", (rows, n)), registry.bias_add_config)
    return _spec("bias_add", {"rows": rows, "n": n}, found)


def silu_mul(n: int) -> KernelSpec:
    """silu(gate) * up over n elements."""
    found = _find("external", Requirement("silu_mul", (n,)), registry.silu_mul_config)
    return _spec("silu_mul", {"n": n}, found)
