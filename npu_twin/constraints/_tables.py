"""Single observations that no formula explains, kept as tables.

Origin: Xilinx/mlir-air e972f2942, ``programming_examples/kernel_registry/details`` (GEMM_bf16_in_bf16_out
as .json and .md, SiLU_Mul_bf16.md, EltwiseAdd_bf16.md). An entry holds for exactly the values it names.
"""

from __future__ import annotations

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

SILU_DESCRIPTOR_ITERATIONS = frozenset({1024, 2048})
"""n/(tile_n*cores) at which SiLU_Mul runs out of ids; 512..688, 4096 and 8192 are measured to fit."""

GEMM_L1_REFUSED: frozenset[tuple[str, int, int, int, int, int]] = frozenset(
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

GEMM_L1_ACCEPTED: frozenset[tuple[str, int, int, int]] = frozenset(
    {("drain", 32, 64, 192), ("drain", 32, 32, 256)}
)
"""(method, tile_m, tile_k_l1, tile_n) measured to run inside fused ELFs although the formula has no room."""

GEMM_L2_OVERFLOW: frozenset[tuple[int, int, int]] = frozenset({(3584, 3584, 512), (18944, 3584, 512)})
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

GEMM_RUNTIME_FAIL: frozenset[tuple[int, int, int]] = frozenset({(896, 128, 1)})
"""(N, tile_n, herd_n) that build and fail at run time."""

ADD_ZERO_TAIL: frozenset[tuple[int, int, int]] = frozenset({(245760, 2048, 8)})
"""(n, tile, cores) for which everything after the first two tiles stays zero."""

FUSED_FFN_REFUSED_HIDDEN = frozenset({8960, 9728, 11008})
"""Hidden sizes whose O projection and FFN do not fit one decode ELF; 3072, 6144 and 8192 do."""
