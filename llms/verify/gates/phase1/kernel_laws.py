"""How exact a kernel must be: published error figures, and the laws behind them for shapes nobody published.

All figures are mean_rel_L1 of the harness of Xilinx/mlir-air e972f2942 (kernel registry, silicon). A baseline
is the published figure of the very shape and method where there is one, else what its law gives. It is never
a figure of the twin: a twin must not be its own yardstick.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llms.verify.reference.kernels import PUBLISHED_SOURCE, published

# bfp16 products with f32 accumulation: 9.0e-3 to 9.6e-3 over all published f32 and drain rows, independent of
# M, K, N and of the tile. One floor cast on top (fused-cast): 9.7e-3 to 1.0e-2.
GEMM = {"external": 9.4e-3, "drain": 9.4e-3, "fused-cast": 9.85e-3}
GEMM_SPREAD = 0.04
# Low tier: e0^2 + K / (2 tile_k_l1) * eps^2, all published rows to four digits.
DIRECT_STEP = 1.53e-3
# Length along K of one pass of the cascade GEMV, which rounds its running sum after each (bf16_cascade).
CASCADE_PASS = 512
# f32 sum and one cast on both sides: they differ where the order of summation crosses a rounding boundary.
# Largest published figure 2.3e-6 (4096x2560), most are 0.
GEMV_LARGEST = 2.5e-6
# One floor rounding of a sum (all seven published rows 1.9e-3), of two products (2.8e-3, ten rows); three
# roundings of a norm (4.2e-3 to 4.3e-3 for N of 896 and more, 4.6e-3 for heads of 128); tanh table and four
# roundings of SiLU-and-Mul (1.0e-2, nine rows).
ADD, ROPE, NORM, HEAD_NORM, SILU = 1.9e-3, 2.82e-3, 4.3e-3, 4.65e-3, 1.03e-2
SMALL_NORM = 512
# The reciprocal root of a row is rounded down once: a common factor of up to 2^-7 for the whole row.
ROW_FACTOR = 2.0**-7
# Attention, causal: 3.85e-2 at 2048 keys and 4.5e-2 at 16384, so 2.2e-3 more for every doubling; not causal:
# 4.4e-2 to 4.8e-2 for 512 and 1024 keys.
FLASH_CAUSAL, FLASH_CAUSAL_AT, FLASH_DOUBLING, FLASH = 3.85e-2, 2048, 2.17e-3, 4.6e-2
# The first rows of a causal head average few values, so their results are large and come near the absolute
# tolerance. None of the 244 heads of the 11 published causal rows is over it: at most 3 / 244 elements
# per head, with 95 % confidence (rule of three).
FLASH_OVER_PER_HEAD = 3 / 244
SPREAD = 0.05
FLASH_SPREAD = 0.15
# Standard deviations of sampling allowed for outputs of few elements; the relative error of one element
# scatters by about its own size.
SIGMAS = 4.0
# Elements of one row share its scale, so those over come in clumps: up to 2.5 times the mean for a handful
# (published 2048x1024x3072: one where 0.2 are expected), up to 1.3 times it for hundreds.
CLUMPING = 1.5


@dataclass(frozen=True)
class Baseline:
    """Expected mean_rel_L1, the largest one still in tier, and where both come from."""

    value: float
    limit: float
    source: str


def baseline(
    op: str, method: str, dims: Mapping[str, int], tile: Mapping[str, int], causal: bool, elements: int
) -> Baseline:
    """Baseline of a kernel: the published figure of this shape where there is one, else its law.

    Raises ValueError for an operation without a law.
    """
    by_law = law(op, method, dims, tile, causal, elements)
    known = published(op, method, dims, causal)
    if known is None:
        return by_law
    # A figure is printed to a digit; the law still bounds what a row copied from elsewhere would allow.
    value = known.mean_rel_L1
    room = max(by_law.limit - by_law.value, SPREAD * value)
    return Baseline(value, max(value + room, by_law.limit), PUBLISHED_SOURCE)


def law(
    op: str, method: str, dims: Mapping[str, int], tile: Mapping[str, int], causal: bool, elements: int
) -> Baseline:
    """Baseline by the laws alone. Raises ValueError for an operation without a law."""
    sampling = 1.0 + SIGMAS / math.sqrt(elements)
    if op == "gemm":
        value = gemm_error(method, dims, tile)
        return Baseline(value, value * (1 + GEMM_SPREAD) * sampling, f"law: block format, {method}")
    if op == "gemv":
        return Baseline(0.0, max(GEMV_LARGEST, 2 * 2.0**-8 / elements), "law: f32 sum, one cast")
    if op == "rms_norm":
        value = HEAD_NORM if dims["N"] <= SMALL_NORM else NORM
        row = SIGMAS / 2 * ROW_FACTOR / math.sqrt(12 * dims["M"])
        return Baseline(value, value * (1 + SPREAD) * sampling + row, "law: three floor roundings")
    if op == "flash_attention":
        value = FLASH
        if causal:
            value = FLASH_CAUSAL + FLASH_DOUBLING * math.log2(dims["lk"] / FLASH_CAUSAL_AT)
        return Baseline(value, value * (1 + FLASH_SPREAD) * sampling, "law: exp2 table, bf16 running sums")
    laws = {
        "eltwise_add": (ADD, "law: one floor rounding"),
        "bias_add": (ADD, "law: one floor rounding"),
        "rope": (ROPE, "law: one floor rounding of two products"),
        "silu_mul": (SILU, "law: tanh table, four floor roundings"),
    }
    if op not in laws:
        raise ValueError(
            f"no law for the error of kernel {op!r}; known: gemm, gemv, rms_norm, {', '.join(laws)}"
        )
    value, source = laws[op]
    return Baseline(value, value * (1 + SPREAD) * sampling, source)


def gemm_error(method: str, dims: Mapping[str, int], tile: Mapping[str, int]) -> float:
    """mean_rel_L1 of a GEMM method; `direct` grows with the number of roundings along K.

    Raises ValueError for an unknown method.
    """
    if method == "direct":
        steps = dims["K"] / tile.get("tile_k_l1", 32)
        return math.sqrt(GEMM["external"] ** 2 + steps / 2 * DIRECT_STEP**2)
    if method not in GEMM:
        raise ValueError(f"no law for a GEMM of method {method!r}; known: direct, {', '.join(GEMM)}")
    return GEMM[method]


def expected_over(
    op: str, method: str, dims: Mapping[str, int], tile: Mapping[str, int], rtol: float, atol: float
) -> float:
    """Elements that break the gate in a correct kernel, on average.

    A GEMM of the harness has results of variance 1/K and an error of mean_rel_L1 times that size, both normal
    and independent, against an absolute tolerance that knows no K: small K and near-zero results go over.
    Published: 1 of 2048x1024x3072, 2 of 2048x896x4864, 4 % of 192x64x320. Of every other kernel all published
    rows are within tolerance, which bounds what attention has by its number of heads.
    """
    if op == "flash_attention":
        return FLASH_OVER_PER_HEAD * dims["q_heads"]
    if op != "gemm":
        return 0.0
    spread = 1.0 / math.sqrt(dims["K"])
    # The casts scale with the result and are covered by rtol; near zero only the block format is left.
    error = (gemm_error(method, dims, tile) if method == "direct" else GEMM["external"]) * spread
    grid = np.linspace(0.0, 6.0, 601)
    density = np.exp(-grid * grid / 2) * math.sqrt(2 / math.pi)
    beyond = np.array([math.erfc((atol + rtol * spread * r) / error / math.sqrt(2)) for r in grid])
    share = float(np.sum(density * beyond) * (grid[1] - grid[0]))
    return share * dims["M"] * dims["N"]


def most_over(expected: float, published: int = 0) -> int:
    """Largest number of elements over that the law, or a published row, still explains."""
    explained = CLUMPING * expected + SIGMAS * math.sqrt(expected) + 2.0
    return max(published, int(explained) if expected > 1e-3 else 0)
