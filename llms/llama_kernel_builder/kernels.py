"""Leaf kernels: specs with the tile the registry holds for their shape.

Every function raises `kernel_registry.registry_lookup.UnmeasuredShape` when the registry has no
row, naming the command that adds it: a tile is never guessed. Inside `recording()` the registry is not
asked; the shapes that would be are collected instead, so that a sweep can add them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kernel_registry import registry_lookup as registry

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

    @property
    def dims(self) -> dict[str, int]:
        """Dimensions by name."""
        return dict(zip(registry.DIMS[self.op], self.shape, strict=True))

    def config(self) -> registry.KernelConfig:
        """What the registry configures the kernel with. Raises UnmeasuredShape."""
        return registry.config(
            self.op,
            method="",
            output_dtype=self.output_dtype,
            precision=self.precision,
            causal=self.causal,
            registry=None,
            **self.dims,
        )

    def spec(self, config: registry.KernelConfig, attrs: Mapping[str, Scalar]) -> KernelSpec:
        """The kernel in this configuration; `attrs` come on top of those of the registry row."""
        attrs = {**config.attrs, **attrs}
        method, tile, herd = config.method, config.tile, config.herd
        return KernelSpec.make(self.op, self.dims, method, tile, herd, attrs, dtype_out=self.output_dtype)


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


def _leaf(need: Requirement, method: str, attrs: Mapping[str, Scalar] | None = None) -> KernelSpec:
    """The kernel as the registry has it; while shapes are collected, one of this method without a tile, good
    for shapes and not for compilation.
    """
    if _recorded is None:
        config = need.config()
    else:
        _recorded[need] = None
        config = registry.KernelConfig(need.op, method, {}, (1, 1), {}, "none", "none")
    return need.spec(config, attrs or {})


def gemm(M: int, K: int, N: int, *, output_dtype: str = "bf16", precision: str = "high") -> KernelSpec:
    """[M, K] x [K, N] -> [M, N], bf16 in, f32 accumulation in tier `high`."""
    return _leaf(Requirement("gemm", (M, K, N), output_dtype, precision), "drain")


def gemv(M: int, K: int) -> KernelSpec:
    """[M, K] x [K] -> [M], bf16, one rounding."""
    return _leaf(Requirement("gemv", (M, K)), "external")


def rms_norm(M: int, N: int, eps: float) -> KernelSpec:
    """Weighted RMSNorm of M rows of length N, sum of squares in f32, eps from the model's config."""
    return _leaf(Requirement("rms_norm", (M, N)), "weighted", {"eps": eps})


def rope(rows: int, head_dim: int) -> KernelSpec:
    """Half-split rotary embedding, one row per head and position."""
    return _leaf(Requirement("rope", (rows, head_dim)), "half_split")


def flash_attention(seq_len: int, head_dim: int, q_heads: int, kv_heads: int) -> KernelSpec:
    """Causal attention of `seq_len` queries over as many keys, GQA by head groups."""
    need = Requirement("flash_attention", (seq_len, seq_len, head_dim, q_heads, kv_heads), causal=True)
    return _leaf(need, "seq_first" if head_dim <= 64 else "head_first", {"causal": True})


def eltwise_add(n: int) -> KernelSpec:
    """Sum of two vectors of n elements."""
    return _leaf(Requirement("eltwise_add", (n,)), "default")


def bias_add(rows: int, n: int) -> KernelSpec:
    """Add one row of n elements to every row."""
    return _leaf(Requirement("bias_add", (rows, n)), "default")


def silu_mul(n: int) -> KernelSpec:
    """silu(gate) * up over n elements."""
    return _leaf(Requirement("silu_mul", (n,)), "external")
