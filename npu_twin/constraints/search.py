"""Legal configurations of a kernel at a shape: a small space worth sweeping, every entry free of violations.

The space holds what the published rows use and its natural neighbours, not every legal tile: inner K counts
are even (odd ones are where silent corruption was seen), herds use as many cores as the shape allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from npu_twin.constraints import _tables
from npu_twin.constraints._types import Config
from npu_twin.constraints.gemm import TILE_M, l1_bytes
from npu_twin.constraints.gemv import STACK_BYTES
from npu_twin.constraints.program import FUSED_DECODE_K
from npu_twin.constraints.rules import COLUMNS, L1_BYTES, L2_BYTES, ROWS

TIER_METHODS: Mapping[str, tuple[str, ...]] = {
    "high": ("drain", "fused-cast"),
    "low": ("direct",),
    "f32": ("external",),
}
"""GEMM methods by tier: ``high`` accumulates in f32 and casts once, ``low`` rounds once per K step, ``f32``
has f32 output.
"""

SEARCH_TILE_M: Mapping[str, tuple[int, ...]] = {"drain": (16, 32, 48)}
"""Narrower than the rule where no published row goes further."""

GEMV_TILES = (2, 4, 8, 16)
LANES = 64
MOST_SLICES = 5
"""Partial products, their sums and the residual are ten launches of one program then (M6)."""


def _divisors(n: int, most: int, step: int = 1) -> list[int]:
    return [d for d in range(step, min(n, most) + 1, step) if n % d == 0]


def _gemm_space(d: Mapping[str, int], methods: tuple[str, ...]) -> Iterator[Config]:
    M, K, N = d["M"], d["K"], d["N"]
    k_tiles = _k_tiles(K, N)
    for method in methods:
        for tm in SEARCH_TILE_M.get(method, TILE_M[method]):
            herds_m = [h for h in range(COLUMNS, 0, -1) if M % (tm * h) == 0][:2]
            for hm in herds_m:
                for hn in range(ROWS, 0, -1):
                    widths = list(_divisors(N // hn, 256, 16)) if N % hn == 0 else []
                    for tn in widths[-4:]:
                        for k2, k1 in k_tiles:
                            if not _roomy(method, tm, k2, k1, tn):
                                continue
                            tile = {"tile_m": tm, "tile_k_l2": k2, "tile_k_l1": k1, "tile_n": tn}
                            yield Config("gemm", method, d, tile, (hm, hn))


def _roomy(method: str, tm: int, k2: int, k1: int, tn: int) -> bool:
    """Whether a tile leaves room for the stack in L1 and for two copies of A and B in L2.

    Tighter than the rules, whose exceptions were each seen at one shape only.
    """
    return l1_bytes(method, tm, k1, tn) <= L1_BYTES - STACK_BYTES and 4 * k2 * (tm + tn) <= L2_BYTES


def _k_tiles(K: int, N: int) -> list[tuple[int, int]]:
    """(tile_k_l2, tile_k_l1) pairs: tile_k_l1 32, else 48, 16 or 8, with an even number of inner steps.

    A single inner step is a candidate too where the number of outer steps is even: odd counts are where
    wrong numbers were seen (K=320 with 64/64), and wide matrices leave nothing else (K=3584, N=18944).
    """
    for k1 in (32, 48, 16, 8):
        if K % k1 != 0:
            continue
        pairs = [
            (k2, k1)
            for k2 in _divisors(K, max(512, min(K, 1024)), k1)
            if (k2 // k1) % 2 == 0 and k2 >= 64 and k2 * N <= _tables.B_STRIDE_POWER_OF_TWO
        ]
        if (K // k1) % 2 == 0 or k1 == K:
            pairs.insert(0, (k1, k1))
        if pairs:
            return pairs[:1] + pairs[1:][-6:]
    return []


def _gemv_space(d: Mapping[str, int], method: str) -> Iterator[Config]:
    M = d["M"]
    for hm in range(COLUMNS, 0, -1):
        for tm in _divisors(M // hm, 64, 2) if M % hm == 0 else []:
            for mi in (tm, tm // 2, tm // 4):
                if mi and tm % mi == 0:
                    yield Config("gemv", method, d, {"tile_m": tm, "m_input": mi}, (hm, 1))


def _usual(configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """Only GEMV tiles of the published rows, unless none of those is legal."""
    usual = tuple(c for c in configs if c.op != "gemv" or c.tile["tile_m"] in GEMV_TILES)
    return usual or configs


def _gemv_add_space(d: Mapping[str, int], method: str) -> Iterator[Config]:
    """Tiles that the plain GEMV's L2 rule allows: the cascade's own limit is not published."""
    M, K = d["M"], d["K"]
    for hm in range(COLUMNS, 0, -1):
        for tm in _divisors(M // hm, 16, 2) if M % hm == 0 else []:
            if 2 * hm * tm * (K + 1) > L2_BYTES:
                continue
            yield Config("gemv_add", method, d, {"tile_m": tm, "m_input": tm}, (hm, ROWS))


def _herds(most: int) -> list[tuple[int, int]]:
    """Herds of the published sweeps: along the columns, then those of two and four rows."""
    return [(8, 1), (4, 1), (2, 1), (1, 1), *([(2, 4)] if most == 8 else [(8, 2), (4, 4)])]


def _stream_space(
    op: str, d: Mapping[str, int], key: str, tiles: tuple[int, int], most: int
) -> Iterator[Config]:
    n = d["n"]
    method = "external" if op == "silu_mul" else "tanh_direct_codegen" if op == "gelu" else "default"
    for herd in _herds(most):
        cores = herd[0] * herd[1]
        if n % cores:
            continue
        sizes = [t for t in _divisors(n // cores, tiles[1], 16) if t >= tiles[0]]
        for tile in sizes[-5:]:
            yield Config(op, method, d, {key: tile}, herd)


def _rows_space(
    op: str, method: str, d: Mapping[str, int], key: str, herds: tuple[int, ...]
) -> Iterator[Config]:
    """Herds along the columns that divide the rows; sizes outside of ``herds`` only where those leave one
    core.
    """
    fits = [h for h in herds if d[key] % h == 0]
    if fits == [1] and op in ("rope", "bias_add"):
        fits = [h for h in range(COLUMNS, 0, -1) if d[key] % h == 0]
    for h in fits:
        yield Config(op, method, d, {}, (h, 1))


def _attention_space(d: Mapping[str, int], layouts: tuple[str, ...], causal: bool) -> Iterator[Config]:
    hd = d["head_dim"]
    tile_q, lkp = (64, 64) if hd <= 128 else (32, 32)
    for layout in layouts:
        for stages in (4, 2):
            for hpu in (2, 1):
                for nqt in range(COLUMNS, 0, -1):
                    tile = {
                        "lqp": tile_q * nqt,
                        "lkp": lkp,
                        "num_q_tiles": nqt,
                        "dv_tile": 64 if hd <= 128 else 128,
                    }
                    attrs = {"causal": causal, "heads_per_unroll": hpu, "num_cascade_stages": stages}
                    yield Config("flash_attention", layout, d, tile, (hpu * nqt, stages), attrs)


def _space(op: str, d: Mapping[str, int], method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    usual = (8, 4, 2, 1)
    if op == "gemm":
        tier = str(attrs.get("precision", "high"))
        return _gemm_space(d, (method,) if method else TIER_METHODS[tier])
    if op == "flash_attention":
        layouts = (method,) if method else ("seq_first" if d["head_dim"] <= 64 else "head_first",)
        return _attention_space(d, layouts, bool(attrs.get("causal", False)))
    spaces: dict[str, Callable[[], Iterator[Config]]] = {
        "gemv": lambda: _gemv_space(d, "external"),
        "gemv_add": lambda: _gemv_add_space(d, "cascade"),
        "norm_gateup_swiglu": lambda: iter(
            [Config(op, "cascade", d, {}, (COLUMNS, min(4, max(1, d["emb"] // 512))))]
        ),
        "rms_norm": lambda: _rows_space(op, method or "weighted", d, "M", usual),
        "layer_norm": lambda: _rows_space(op, "affine", d, "M", usual),
        "rope": lambda: _rows_space(op, method or "half_split", d, "rows", usual),
        "bias_add": lambda: _rows_space(op, "default", d, "rows", usual),
        "eltwise_add": lambda: _stream_space(op, d, "tile", (16, 4096), 8),
        "silu_mul": lambda: _stream_space(op, d, "tile_n", (16, 5120), 8),
        "gelu": lambda: _stream_space(op, d, "tile_n", (512, 6144), 16),
    }
    if op not in spaces:
        raise ValueError(
            f"unknown operation {op!r}; known: gemm, flash_attention, {', '.join(sorted(spaces))}"
        )
    return spaces[op]()


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
    if op == "gemm" and not method and precision not in TIER_METHODS:
        raise ValueError(f"unknown precision {precision!r}; known: {', '.join(TIER_METHODS)}")
    return _legal(op, tuple(sorted(dims.items())), method, precision, causal)


@lru_cache(maxsize=512)
def _legal(
    op: str, dims: tuple[tuple[str, int], ...], method: str, precision: str, causal: bool
) -> tuple[Config, ...]:
    from npu_twin.constraints import check_raw

    attrs = {"precision": precision, "causal": causal}
    found: dict[str, Config] = {}
    for config in _space(op, dict(dims), method, attrs):
        if not check_raw(config):
            found.setdefault(config.describe(), config)
    return _usual(tuple(found.values()))


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


def nearest_legal(op: str, method: str, config: Any) -> Config | None:
    """The legal configuration closest to ``config`` (ratio of tiles and herd), or None."""
    attrs = config.attrs
    candidates: tuple[Config, ...] = ()
    for wanted in dict.fromkeys((method, "")):
        if op == "gemm" and wanted not in TILE_M and wanted:
            continue
        candidates = legal_configs(op, config.dims, method=wanted, causal=bool(attrs.get("causal", False)))
        if candidates:
            break
    return min(candidates, key=lambda c: (_distance(c, config), -c.cores), default=None)


def _distance(a: Config, b: Any) -> float:
    total = 0.0
    for key, value in a.tile.items():
        other = b.tile.get(key, value)
        total += max(value, other) / max(1, min(value, other)) - 1
    for mine, theirs in zip(a.herd, b.herd, strict=True):
        total += max(mine, theirs) / max(1, min(mine, theirs)) - 1
    for key in ("heads_per_unroll", "num_cascade_stages"):
        total += abs(a.attrs.get(key, 0) - b.attrs.get(key, a.attrs.get(key, 0)))
    return total


__all__ = ["TIER_METHODS", "gemv_slices", "legal_configs", "nearest_legal"]
