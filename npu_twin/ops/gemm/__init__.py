"""Matrix times matrix by four published methods (Xilinx/mlir-air e972f2942, kernel registry).

This file has operands, configurations and cost; the values are in ``datapath``, the rules in ``rules``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from npu_twin.npu2 import COLUMNS, L1_BYTES, L2_BYTES, ROWS
from npu_twin.ops._streams import BF16, ceil_div, divisors
from npu_twin.ops.gemm import rules
from npu_twin.ops.gemv import STACK_BYTES
from npu_twin.opset import Config, Dims, LaunchLike, Op, Signature, Values, read, write

if TYPE_CHECKING:
    from npu_twin.datapath.arithmetic import Arithmetic
    from npu_twin.listing import Launch
    from npu_twin.memory import OperandView

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
AUTO_FUSED_CAST_FROM = 4_000_000_000
F32 = 4
CAST_TILES = 8
CAST_BYTES = F32 + BF16
"""Traffic of one element of the cast launch: the f32 sum read, the bf16 result written."""
SUMS_LEAVE_BY_DMA = frozenset({"external", "fused-cast"})


def auto_method(m: int, k: int, n: int) -> str:
    """Default high-precision method of the public runner (rule G12): ``fused-cast`` or ``drain``."""
    return "fused-cast" if m * k * n >= AUTO_FUSED_CAST_FROM else "drain"


def signature(d: Dims, method: str, tile: Mapping[str, int]) -> Signature:
    """Operands: a [M, K], b [K, N], out [M, N], f32 for ``external``; ``fused-cast`` has an f32 scratch."""
    M, K, N = d["M"], d["K"], d["N"]
    operands = {
        "a": read(M, K),
        "b": read(K, N),
        "out": write(M, N, dtype="f32" if method == "external" else "bf16"),
    }
    if method == "fused-cast":
        operands["scratch"] = write(M, N, dtype="f32")
    return operands


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Callable[[], None]:
    """The product in block floating point; torch is imported here, not with the rules."""
    from npu_twin.ops.gemm import datapath

    return datapath.prepare(launch, operands, choice)


def space(d: Dims, method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    """The widest tiles of the methods of a tier (attribute ``precision``) or of one method.

    Raises ValueError for an unknown tier.
    """
    tier = str(attrs.get("precision", "high"))
    if not method and tier not in TIER_METHODS:
        raise ValueError(f"unknown precision {tier!r}; known: {', '.join(TIER_METHODS)}")
    M, K, N = d["M"], d["K"], d["N"]
    k_tiles = _k_tiles(K, N)
    for name in (method,) if method else TIER_METHODS[tier]:
        for tm in SEARCH_TILE_M.get(name, rules.TILE_M.get(name, ())):
            herds_m = [h for h in range(COLUMNS, 0, -1) if M % (tm * h) == 0][:2]
            for hm in herds_m:
                for hn in range(ROWS, 0, -1):
                    widths = list(divisors(N // hn, 256, 16)) if N % hn == 0 else []
                    for tn in widths[-4:]:
                        for k2, k1 in k_tiles:
                            if not _roomy(name, tm, k2, k1, tn):
                                continue
                            tile = {"tile_m": tm, "tile_k_l2": k2, "tile_k_l1": k1, "tile_n": tn}
                            yield Config("gemm", name, d, tile, (hm, hn))


def _roomy(method: str, tm: int, k2: int, k1: int, tn: int) -> bool:
    """Whether a tile leaves room for the stack in L1 and for two copies of A and B in L2.

    Tighter than the rules, whose exceptions were each seen at one shape only.
    """
    return rules.l1_bytes(method, tm, k1, tn) <= L1_BYTES - STACK_BYTES and 4 * k2 * (tm + tn) <= L2_BYTES


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
            for k2 in divisors(K, max(512, min(K, 1024)), k1)
            if (k2 // k1) % 2 == 0 and k2 >= 64 and k2 * N <= rules.B_STRIDE_POWER_OF_TWO
        ]
        if (K // k1) % 2 == 0 or k1 == K:
            pairs.insert(0, (k1, k1))
        if pairs:
            return pairs[:1] + pairs[1:][-6:]
    return []


def work(p: Values, launch: LaunchLike, alone: bool) -> float:
    """Return the work of the matrix product alone, without the cast launch of the fused-cast method.

    A is read once per block of columns of B and B once per block of rows of A; both share the bandwidth of
    DDR with the output. A core is bound by its calls of the micro kernel. Draining the pipe before the next
    block of columns adds to that, and so does the pass of the core over its accumulators where it casts them
    or the compiler's own kernel copies them; the external kernel's f32 sums leave by DMA as they are.
    """
    dims, tile, herd, method = launch.dims, launch.tile, launch.herd, launch.method
    f32_out = method == "external" or launch.attrs.get("output_dtype") == "f32"
    m, k, n = dims["M"], dims["K"], dims["N"]
    tile_m, tile_n, k_l2, k_l1 = tile["tile_m"], tile["tile_n"], tile["tile_k_l2"], tile["tile_k_l1"]
    row_blocks = ceil_div(m, tile_m * herd[0])
    column_blocks = ceil_div(n, tile_n * herd[1])
    blocks = row_blocks * column_blocks
    read = BF16 * k * (m * column_blocks + n * row_blocks) * (1.0 + p["gemm.block_edge"] / k_l2)
    written = (F32 if f32_out or method == "fused-cast" else BF16) * m * n
    memory = (read + written) / p["gemm.ddr_gbps"] * 1e-3
    macs = tile_m * tile_n * k_l1 * 1e-3
    if method == "direct":
        call_ns = p["gemm.direct_call_ns"] + p["gemm.direct_ns_per_kmac"] * macs
        if not f32_out:
            call_ns += p["gemm.direct_round_ns"] * tile_m * tile_n
    else:
        call_ns = p["gemm.call_ns"] + p["gemm.ns_per_kmac"] * macs
    core = blocks * k / k_l1 * call_ns * 1e-3
    copied = 0 if method in SUMS_LEAVE_BY_DMA else blocks * tile_m * tile_n
    store = p["gemm.store_ns"] * copied * 1e-3
    restart = p["gemm.restart_us"] * column_blocks * herd[0] / COLUMNS / row_blocks
    return max(memory, core) + store + restart


def second_launch(p: Values, launch: LaunchLike) -> float:
    """The cast launch of the fused-cast method, loading included."""
    if launch.method != "fused-cast":
        return 0.0
    loading = p["program.reload_us"] + p["program.reload_us_per_tile"] * CAST_TILES
    return loading + CAST_BYTES * launch.dims["M"] * launch.dims["N"] / p["stream.ddr_gbps"] * 1e-3


OP = Op(
    ("M", "K", "N"),
    signature,
    prepare,
    rules.check,
    space,
    work,
    methods=("drain", "fused-cast", "direct", "external"),
    rounding="nearest_even",
    tile_keys=rules.TILE_KEYS,
    second_launch=second_launch,
)
