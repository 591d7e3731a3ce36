"""Rules of the GEMM: divisibility, micro kernel, L1, L2, descriptors and the silent K tilings."""

from __future__ import annotations

from npu_twin.constraints import _tables as tables
from npu_twin.constraints._types import Findings, Found, LaunchLike
from npu_twin.constraints.rules import L1_BYTES, MAX_STRIDE

TILE_KEYS = ("tile_m", "tile_k_l2", "tile_k_l1", "tile_n")
TILE_M = {"drain": (16, 32, 48, 64), "fused-cast": (64,), "direct": (64,), "external": (64,)}
AUTO_FUSED_CAST_FROM = 4_000_000_000


def auto_method(m: int, k: int, n: int) -> str:
    """Default high-precision method of the public runner (rule G12): ``fused-cast`` or ``drain``."""
    return "fused-cast" if m * k * n >= AUTO_FUSED_CAST_FROM else "drain"


def l1_bytes(method: str, tile_m: int, tile_k_l1: int, tile_n: int) -> int:
    """L1 of one core in bytes: f32 accumulator, two bf16 copies of A and B, and the drain's output tile."""
    total = 4 * tile_m * tile_n + 4 * tile_m * tile_k_l1 + 4 * tile_k_l1 * tile_n
    return total + (2 * tile_m * tile_n if method == "drain" else 0)


def check_gemm(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one GEMM launch."""
    d, t, method = launch.dims, launch.tile, launch.method
    M, K, N = d["M"], d["K"], d["N"]
    tm, k2, k1, tn = (t[key] for key in TILE_KEYS)
    hm, hn = launch.herd
    if M % (tm * hm):
        yield Found(
            "G1", f"M must be a multiple of tile_m*herd_m = {tm * hm}", {"M": M, "tile_m": tm, "herd_m": hm}
        )
    if K % k2 or k2 % k1:
        yield Found(
            "G2",
            "K must be a multiple of tile_k_l2, and tile_k_l2 one of tile_k_l1",
            {"K": K, "tile_k_l2": k2, "tile_k_l1": k1},
        )
    if N % (tn * hn):
        yield Found(
            "G3", f"N must be a multiple of tile_n*herd_n = {tn * hn}", {"N": N, "tile_n": tn, "herd_n": hn}
        )
    if tm % 16 or tn % 16:
        yield Found("G4", "tile_m and tile_n must be multiples of 16", {"tile_m": tm, "tile_n": tn})
    if k1 % 8:
        yield Found("D7", "tile_k_l1 must be a multiple of the matrix unit's 8", {"tile_k_l1": k1})
    if (N, tn, hn) in tables.GEMM_RUNTIME_FAIL:
        yield Found("G5", "this herd builds and fails at run time", {"N": N, "tile_n": tn, "herd_n": hn})
    if tm not in TILE_M.get(method, (tm,)) and tm % 16 == 0:
        yield Found(
            "G6",
            f"the {method} kernel is built for tile_m {' or '.join(map(str, TILE_M[method]))}",
            {"tile_m": tm},
        )
    if k2 % k1 == 0 and K % k2 == 0 and (K, k2, k1) in tables.SILENT_K_TILINGS:
        yield Found(
            "G10",
            "this K tiling is known to give wrong numbers without an error",
            {"K": K, "tile_k_l2": k2, "tile_k_l1": k1},
        )
    if launch.attrs.get("bf16_emulation", True) is False:
        yield Found(
            "G19", "the native bf16 multiply uses another accumulator layout", {"bf16_emulation": False}
        )
    yield from _memory(method, M, K, N, tm, k2, k1, tn)
    yield from _stride(method, N, k2)
    yield from _object(launch)
    if "G11" in switches and method in ("fused-cast", "external") and M // (tm * hm) > 1:
        yield Found(
            "G11", "more than one iteration along M leaves stale rows", {"iterations": M // (tm * hm)}
        )


def _memory(method: str, M: int, K: int, N: int, tm: int, k2: int, k1: int, tn: int) -> Findings:
    need = l1_bytes(method, tm, k1, tn)
    if need > L1_BYTES and (method, tm, k1, tn) not in tables.GEMM_L1_ACCEPTED:
        yield Found(
            "G7",
            f"the tiles of one core need {need} bytes, L1 has {L1_BYTES}",
            {"tile_m": tm, "tile_k_l1": k1, "tile_n": tn, "bytes": need},
        )
    if (method, M, K, N, k2, tn) in tables.GEMM_L1_REFUSED:
        yield Found(
            "G8",
            "observed to over-allocate L1 at exactly this shape and tile",
            {"tile_k_l2": k2, "tile_n": tn},
        )
    if (K, N, k2) in tables.GEMM_L2_OVERFLOW:
        yield Found("G9", "observed to overflow L2", {"K": K, "N": N, "tile_k_l2": k2})
    if (method, K, N, k2) in tables.LIVE_DESCRIPTORS_EXCEEDED:
        yield Found(
            "B9", "more than 16 live descriptors on one memory tile", {"K": K, "N": N, "tile_k_l2": k2}
        )
    if (method, M, K, N, k2) in tables.DESCRIPTOR_IDS_EXHAUSTED:
        yield Found("B11", "the descriptor ids run out", {"N": N, "tile_k_l2": k2})


def _stride(method: str, N: int, k2: int) -> Findings:
    stride = k2 * N
    if (method, k2, N) in tables.B_STRIDE_REFUSED:
        yield Found(
            "B8", "tile_k_l2*N is observed not to build", {"tile_k_l2": k2, "N": N, "tile_k_l2*N": stride}
        )
    elif stride > MAX_STRIDE and (method, k2, N) not in tables.B_STRIDE_ACCEPTED:
        power = stride & (stride - 1) == 0
        if not (power and stride <= tables.B_STRIDE_POWER_OF_TWO):
            yield Found(
                "B7",
                f"descriptor stride {stride} is outside of 1..{MAX_STRIDE} and not observed to build",
                {"tile_k_l2": k2, "N": N, "tile_k_l2*N": stride},
            )


def _object(launch: LaunchLike) -> Findings:
    built_for = launch.attrs.get("object")
    if not built_for:
        return
    differing = {k: v for k, v in built_for.items() if launch.tile.get(k) != v}
    if differing:
        yield Found(
            "G14",
            "the kernel object was compiled for other tile sizes",
            {
                **{f"object {k}": v for k, v in differing.items()},
                **{k: launch.tile.get(k) for k in differing},
            },
        )
