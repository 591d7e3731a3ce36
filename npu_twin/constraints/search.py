"""Legal configurations of a kernel at a shape: a small space worth sweeping, every entry free of violations.

The space of an operation holds what the published rows use and its natural neighbours, not every legal tile:
inner K counts are even (odd ones are where silent corruption was seen), herds use as many cores as the shape
allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from npu_twin.constraints.program import FUSED_DECODE_K
from npu_twin.ops import OPS
from npu_twin.opset import Config, LaunchLike

LANES = 64
MOST_SLICES = 5
"""Partial products, their sums and the residual are ten launches of one program then (M6)."""


def legal_configs(
    op: str,
    dims: Mapping[str, int],
    *,
    method: str = "",
    precision: str = "high",
    causal: bool = False,
) -> tuple[Config, ...]:
    """Legal configurations of ``op`` at ``dims``, without duplicates, in a fixed order.

    ``method`` restricts to one implementation (a layout for flash_attention); ``precision`` chooses the GEMM
    tier ``high``, ``low`` or ``f32``. Empty when nothing is legal. Raises ValueError for an unknown operation
    or tier.
    """
    return _legal(op, tuple(sorted(dims.items())), method, precision, causal)


@lru_cache(maxsize=512)
def _legal(
    op: str, dims: tuple[tuple[str, int], ...], method: str, precision: str, causal: bool
) -> tuple[Config, ...]:
    from npu_twin.constraints import check_raw

    if op not in OPS:
        raise ValueError(f"unknown operation {op!r}; known: {', '.join(OPS)}")
    configs: dict[str, Config] = {}
    for config in OPS[op].space(dict(dims), method, {"precision": precision, "causal": causal}):
        if not check_raw(config):
            configs.setdefault(config.describe(), config)
    legal, is_usual = tuple(configs.values()), OPS[op].usual
    return tuple(filter(is_usual, legal)) or legal if is_usual else legal


@lru_cache(maxsize=512)
def gemv_slices(rows: int, k: int) -> tuple[int, ...]:
    """Widths along K of the fewest GEMVs that a product [rows, k] x [k] takes, as even as 64 lanes allow.

    One where a GEMV holds all of K; more where it does not fit one core (V4) or repeats x too often (B2).
    More than two in one program are held to B5. Empty when nothing is legal: K is no multiple of 64, say.
    """
    if k % LANES:
        return ()
    for count in range(1, min(MOST_SLICES, k // LANES) + 1):
        ends = [k // LANES * (i + 1) // count * LANES for i in range(count)]
        widths = tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
        alone = count <= 2 or max(widths) <= FUSED_DECODE_K
        if alone and all(legal_configs("gemv", {"M": rows, "K": width}) for width in set(widths)):
            return widths
    return ()


def nearest_legal(op: str, method: str, config: LaunchLike) -> Config | None:
    """The legal configuration closest to ``config`` (ratio of tiles and herd), or None."""
    attrs = config.attrs
    candidates: tuple[Config, ...] = ()
    for wanted in dict.fromkeys((method, "")):
        candidates = legal_configs(op, config.dims, method=wanted, causal=bool(attrs.get("causal", False)))
        if candidates:
            break
    return min(candidates, key=lambda c: (_distance(c, config), -c.cores), default=None)


def _distance(a: Config, b: LaunchLike) -> float:
    total = 0.0
    for key, value in a.tile.items():
        other = b.tile.get(key, value)
        total += max(value, other) / max(1, min(value, other)) - 1
    for cores, wanted in zip(a.herd, b.herd, strict=True):
        total += max(cores, wanted) / max(1, min(cores, wanted)) - 1
    for key in ("heads_per_unroll", "num_cascade_stages"):
        total += abs(a.attrs.get(key, 0) - b.attrs.get(key, a.attrs.get(key, 0)))
    return total
