"""Rules of the GEMM: divisibility, micro kernel, L1, L2, descriptors and the silent K tilings.

The tables are single observations that no formula explains (Xilinx/mlir-air e972f2942,
``programming_examples/kernel_registry/details``, GEMM_bf16_in_bf16_out as .json and .md). An entry holds for
exactly the values it names.
"""

from __future__ import annotations

from npu_twin.npu2 import L1_BYTES, MAX_STRIDE
from npu_twin.opset import Finding, Findings, LaunchLike

TILE_KEYS = ("tile_m", "tile_k_l2", "tile_k_l1", "tile_n")
TILE_M = {"drain": (16, 32, 48, 64), "fused-cast": (64,), "direct": (64,), "external": (64,)}

B_STRIDE_REFUSED: frozenset[tuple[str, int, int]] = frozenset(
    [("fused-cast", 128, n) for n in (9728, 12288)]
    + [("fused-cast", 256, n) for n in (8960, 9728, 10240, 11008)]
    + [("fused-cast", 512, n) for n in (2560, 6144)]
    + [("direct", 64, 18944), ("direct", 128, 18944)]
    + [("direct", 256, n) for n in (8960, 11008, 12288)]
)
"""(method, tile_k_l2, N) that do not build."""

B_STRIDE_ACCEPTED: frozenset[tuple[str, int, int]] = frozenset(
    [("fused-cast", 64, 18944), ("fused-cast", 128, 10240), ("fused-cast", 128, 14336)]
    + [("fused-cast", 256, 6144), ("external", 256, 6144)]
    + [("direct", 128, n) for n in (8960, 9728, 11008, 12288, 14336)]
)
"""(method, tile_k_l2, N) above the printed stride limit that build; powers of two are handled by a limit."""

B_STRIDE_POWER_OF_TWO = 2097152
"""Largest tile_k_l2*N that builds when the product is a power of two."""

LIVE_DESCRIPTORS_EXCEEDED: frozenset[tuple[str, int, int, int]] = frozenset({("direct", 4096, 12288, 256)})
"""(method, K, N, tile_k_l2) with more than 16 live descriptors on one memory tile."""

DESCRIPTOR_IDS_EXHAUSTED: frozenset[tuple[str, int, int, int, int]] = frozenset(
    {("fused-cast", 2048, 2048, 6144, 512)}
)
"""(method, M, K, N, tile_k_l2) for which the allocator runs out of ids."""

L1_REFUSED: frozenset[tuple[str, int, int, int, int, int]] = frozenset(
    {
        ("fused-cast", 2048, 3584, 512, 256, 128),
        ("fused-cast", 2048, 1536, 8960, 256, 64),
        ("fused-cast", 2048, 1024, 1024, 256, 128),
        ("fused-cast", 2048, 896, 896, 128, 32),
        ("fused-cast", 2048, 1536, 256, 256, 64),
        ("drain", 64, 12288, 960, 512, 240),
        ("drain", 64, 12288, 960, 768, 240),
    }
)
"""(method, M, K, N, tile_k_l2, tile_n) refused for L1 although the formula has room."""

L1_ACCEPTED: frozenset[tuple[str, int, int, int]] = frozenset(
    {("drain", 32, 64, 192), ("drain", 32, 32, 256)}
)
"""(method, tile_m, tile_k_l1, tile_n) measured to run inside fused ELFs although the formula has no room."""

L2_OVERFLOW: frozenset[tuple[int, int, int]] = frozenset({(3584, 3584, 512), (18944, 3584, 512)})
"""(K, N, tile_k_l2) that overflow a memory tile; 512 fits at K=2048, 4096, 12288 and 14336."""

SILENT_K_TILINGS: frozenset[tuple[int, int, int]] = frozenset(
    {
        (960, 160, 32),
        (720, 240, 48),
        (720, 360, 40),
        (720, 720, 48),
        (720, 720, 80),
        (1440, 288, 32),
        (1440, 480, 32),
        (320, 160, 32),
        (320, 64, 64),
        (320, 320, 64),
    }
)
"""(K, tile_k_l2, tile_k_l1) with mean_rel_L1 of 0.7 to 1.0 and no error."""

RUNTIME_FAIL: frozenset[tuple[int, int, int]] = frozenset({(896, 128, 1)})
"""(N, tile_n, herd_n) that build and fail at run time."""


def l1_bytes(method: str, tile_m: int, tile_k_l1: int, tile_n: int) -> int:
    """L1 of one core in bytes: f32 accumulator, two bf16 copies of A and B, and the drain's output tile."""
    total = 4 * tile_m * tile_n + 4 * tile_m * tile_k_l1 + 4 * tile_k_l1 * tile_n
    return total + (2 * tile_m * tile_n if method == "drain" else 0)


def check(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one GEMM launch."""
    d, t, method = launch.dims, launch.tile, launch.method
    M, K, N = d["M"], d["K"], d["N"]
    tm, k2, k1, tn = (t[key] for key in TILE_KEYS)
    hm, hn = launch.herd
    if M % (tm * hm):
        yield Finding(
            "G1", f"M must be a multiple of tile_m*herd_m = {tm * hm}", {"M": M, "tile_m": tm, "herd_m": hm}
        )
    if K % k2 or k2 % k1:
        yield Finding(
            "G2",
            "K must be a multiple of tile_k_l2, and tile_k_l2 one of tile_k_l1",
            {"K": K, "tile_k_l2": k2, "tile_k_l1": k1},
        )
    if N % (tn * hn):
        yield Finding(
            "G3", f"N must be a multiple of tile_n*herd_n = {tn * hn}", {"N": N, "tile_n": tn, "herd_n": hn}
        )
    if tm % 16 or tn % 16:
        yield Finding("G4", "tile_m and tile_n must be multiples of 16", {"tile_m": tm, "tile_n": tn})
    if k1 % 8:
        yield Finding("D7", "tile_k_l1 must be a multiple of the matrix unit's 8", {"tile_k_l1": k1})
    if (N, tn, hn) in RUNTIME_FAIL:
        yield Finding("G5", "this herd builds and fails at run time", {"N": N, "tile_n": tn, "herd_n": hn})
    if tm not in TILE_M.get(method, (tm,)) and tm % 16 == 0:
        yield Finding(
            "G6",
            f"the {method} kernel is built for tile_m {' or '.join(map(str, TILE_M[method]))}",
            {"tile_m": tm},
        )
    if k2 % k1 == 0 and K % k2 == 0 and (K, k2, k1) in SILENT_K_TILINGS:
        yield Finding(
            "G10",
            "this K tiling is known to give wrong numbers without an error",
            {"K": K, "tile_k_l2": k2, "tile_k_l1": k1},
        )
    if launch.attrs.get("bf16_emulation", True) is False:
        yield Finding(
            "G19", "the native bf16 multiply uses another accumulator layout", {"bf16_emulation": False}
        )
    yield from _memory(method, M, K, N, tm, k2, k1, tn)
    yield from _stride(method, N, k2)
    yield from _object(launch)
    if "G11" in switches and method in ("fused-cast", "external") and M // (tm * hm) > 1:
        yield Finding(
            "G11", "more than one iteration along M leaves stale rows", {"iterations": M // (tm * hm)}
        )


def _memory(method: str, M: int, K: int, N: int, tm: int, k2: int, k1: int, tn: int) -> Findings:
    need = l1_bytes(method, tm, k1, tn)
    if need > L1_BYTES and (method, tm, k1, tn) not in L1_ACCEPTED:
        yield Finding(
            "G7",
            f"the tiles of one core need {need} bytes, L1 has {L1_BYTES}",
            {"tile_m": tm, "tile_k_l1": k1, "tile_n": tn, "bytes": need},
        )
    if (method, M, K, N, k2, tn) in L1_REFUSED:
        yield Finding(
            "G8",
            "observed to over-allocate L1 at exactly this shape and tile",
            {"tile_k_l2": k2, "tile_n": tn},
        )
    if (K, N, k2) in L2_OVERFLOW:
        yield Finding("G9", "observed to overflow L2", {"K": K, "N": N, "tile_k_l2": k2})
    if (method, K, N, k2) in LIVE_DESCRIPTORS_EXCEEDED:
        yield Finding(
            "B9", "more than 16 live descriptors on one memory tile", {"K": K, "N": N, "tile_k_l2": k2}
        )
    if (method, M, K, N, k2) in DESCRIPTOR_IDS_EXHAUSTED:
        yield Finding("B11", "the descriptor ids run out", {"N": N, "tile_k_l2": k2})


def _stride(method: str, N: int, k2: int) -> Findings:
    stride = k2 * N
    if (method, k2, N) in B_STRIDE_REFUSED:
        yield Finding(
            "B8", "tile_k_l2*N is observed not to build", {"tile_k_l2": k2, "N": N, "tile_k_l2*N": stride}
        )
    elif stride > MAX_STRIDE and (method, k2, N) not in B_STRIDE_ACCEPTED:
        power = stride & (stride - 1) == 0
        if not (power and stride <= B_STRIDE_POWER_OF_TWO):
            yield Finding(
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
        yield Finding(
            "G14",
            "the kernel object was compiled for other tile sizes",
            {
                **{f"object {k}": v for k, v in differing.items()},
                **{k: launch.tile.get(k) for k in differing},
            },
        )
