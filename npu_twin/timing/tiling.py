"""Tiles by simple rules, where a row or a model does not name them.

The rules restate what the published configurations have in common (Xilinx/mlir-air e972f2942, kernel
registry): the widest tile that divides the shape and fits L1, the deepest L2 block that the descriptors
allow, the method by size. They are meant for predictions; a deployment takes its tiles from the kernel
registry.
"""

from __future__ import annotations

from npu_twin.constraints import auto_method, check, stops_compilation
from npu_twin.opset import Config

_TILE_N = (128, 96, 80, 64, 48, 32, 16)
_NOT_FUSED = (80, 64)
"""Widths at which fused-cast is published as refused (N = 8960, 4864, 11008); direct takes its place."""
_TILE_K_L2 = (512, 384, 320, 256, 192, 144, 128, 96, 80, 64, 48, 32, 16)


def _divisor(size: int, limit: int) -> int:
    return next(h for h in range(min(size, limit), 0, -1) if size % h == 0)


def _rows(m: int, preferred: int) -> tuple[int, int]:
    """Return tile_m and herd_m that cover `m` rows with as many columns of the array as possible."""
    for tile_m in (preferred, 48, 32, 16):
        if tile_m <= preferred and m % (tile_m * 8) == 0:
            return tile_m, 8
    best = max(
        (
            (tile_m, _divisor(m // tile_m, 8))
            for tile_m in (64, 48, 32, 16)
            if tile_m <= max(preferred, 48) and m % tile_m == 0
        ),
        key=lambda pair: (pair[0] * pair[1], pair[1] >= 4, pair[0]),
        default=(16, 1),
    )
    return best


def _columns(n: int) -> tuple[int, int]:
    """Return tile_n and herd_n: the widest tile over four rows of the array, else over fewer."""
    for herd_n in (4, 3, 2, 1):
        for tile_n in _TILE_N:
            if n % (tile_n * herd_n) == 0:
                return tile_n, herd_n
    return 16, 1


def _depths(k: int, n: int) -> list[int]:
    """Return the L2 depths that divide `k`, best first: 512 pays for square powers of two only."""
    fitting = [d for d in _TILE_K_L2 if k % d == 0] or [_divisor(k, 64)]
    if k % 256 == 0 and 512 in fitting and not (k >= 2048 and n >= 2048 and n == _power_of_two_floor(n)):
        fitting.remove(512)
    if k % 256 == 0:
        fitting.sort(key=lambda d: (d not in (512, 256, 128, 64, 32), -d))
    return fitting


def _power_of_two_floor(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def gemm(m: int, k: int, n: int, method: str = "", herd: tuple[int, int] | None = None) -> Config:
    """Return a GEMM with the tile the rules choose; `method` and `herd` are chosen too unless given.

    Above 4e9 multiply-adds the fused-cast method is taken where its 64x128 tile divides the shape and the
    runtime can split the columns of blocks; otherwise the compiler's own kernel with a 64x64 tile.
    """
    tile_n, herd_n = _columns(n)
    chosen = method or auto_method(m, k, n)
    if not method and chosen == "fused-cast":
        count = n // (tile_n * herd_n)
        splits = count <= 8 or count % 2 == 0
        if m % 64:
            chosen = "drain"
        elif tile_n in _NOT_FUSED or not splits:
            chosen, tile_n, herd_n = "direct", 64, 4
            if n % 256:
                tile_n, herd_n = _columns(n)
    tile_m, herd_m = _rows(m, 32 if chosen == "drain" else 64)
    if herd is not None:
        herd_m, herd_n = herd
        tile_m = min(tile_m, max(16, m // herd_m)) if m % (tile_m * herd_m) else tile_m
        tile_n = next((t for t in (240, *_TILE_N) if n % (t * herd_n) == 0), tile_n)
    attrs: dict[str, object] = {}
    first: Config | None = None
    for k_l2 in _depths(k, n):
        k_l1 = 48 if k_l2 % 32 and k_l2 % 48 == 0 else _divisor(k_l2, 32)
        tile = {"tile_m": tile_m, "tile_k_l2": k_l2, "tile_k_l1": k_l1, "tile_n": tile_n}
        call = Config("gemm", chosen, {"M": m, "K": k, "N": n}, tile, (herd_m, herd_n), attrs)
        first = first or call
        if not stops_compilation(check(call)) and not slow_tiling(call):
            return call
    assert first is not None
    return first


def slow_tiling(call: Config) -> bool:
    """Return whether this is the one published K tiling that builds and collapses (see `exceptions`)."""
    d = call.dims
    return call.method == "fused-cast" and (d["K"], d["N"], call.tile["tile_k_l2"]) == (3584, 3584, 256)


def gemv(m: int, k: int) -> Config:
    """Return a matrix-vector product: the tallest power-of-two tile that fits half of L2."""
    for tile_m in (16, 8, 4, 2):
        call = Config("gemv", "external", {"M": m, "K": k}, {"tile_m": tile_m, "m_input": tile_m}, (8, 1))
        if m % (tile_m * 8) == 0 and tile_m * k <= 16384:
            return call
        halved = Config("gemv", "external", {"M": m, "K": k}, {"tile_m": tile_m, "m_input": 1}, (8, 1))
        if tile_m == 2 and m % 16 == 0:
            return halved
    herd = _divisor(max(m // 2, 1), 8)
    return Config("gemv", "external", {"M": m, "K": k}, {"tile_m": 2, "m_input": 1}, (herd, 1))


def rows_herd(rows: int) -> tuple[int, int]:
    """Return the herd of a kernel that works row by row."""
    return (next(h for h in (8, 4, 2, 1) if rows % h == 0), 1)


def attention(lq: int, lk: int, head_dim: int, q_heads: int, kv_heads: int, causal: bool) -> Config:
    """Return attention with the published tiling of its head dimension."""
    wide = head_dim > 128
    tile = {
        "lqp": 256,
        "lkp": 32 if wide else 64,
        "num_q_tiles": 8 if wide else 4,
        "dv_tile": 128 if wide else 64,
    }
    unroll = 2 if not wide and q_heads % 2 == 0 else 1
    dims = {"lq": lq, "lk": lk, "head_dim": head_dim, "q_heads": q_heads, "kv_heads": kv_heads}
    attrs: dict[str, object] = {"causal": causal, "heads_per_unroll": unroll, "num_cascade_stages": 4}
    method = "seq_first" if head_dim <= 64 else "head_first"
    return Config("flash_attention", method, dims, tile, (8, 4), attrs)
