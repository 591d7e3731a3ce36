"""Work of each kernel in microseconds: what one launch does once it is loaded, from shape, tile and herd.

Every formula is a bound of the memory system or of a core, plus the parts that nothing hides. Sizes are in
elements, traffic in bytes; a time in `GB/s` divides bytes by 1000 to give microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from npu_twin.timing.exceptions import factor
from npu_twin.timing.parameters import Values
from npu_twin.timing.types import LaunchLike

_BF16 = 2
_F32 = 4
_COLUMNS = 8
CAST_TILES = 8
_CAST_BYTES = _F32 + _BF16
"""Traffic of one element of the cast launch: the f32 sum read, the bf16 result written."""
ARRAY_TILES = 32
STANDALONE_GROUP = 4
"""Descriptors that the runtime of a kernel of its own keeps in flight; programs are built with 16."""
PROGRAM_GROUP = 16
PINGPONG_K = 8192
"""From this width on two copies of the rows do not fit L1 and a product runs without double buffers."""


_SUMS_LEAVE_BY_DMA = frozenset({"external", "fused-cast"})


def _ceil(size: int, part: int) -> int:
    return -(-size // max(part, 1))


def largest_divisor(count: int, limit: int) -> int:
    """Return the largest divisor of `count` that is not above `limit`."""
    for divisor in range(min(count, limit), 1, -1):
        if count % divisor == 0:
            return divisor
    return 1


def tiles(launch: LaunchLike) -> int:
    """Return how many compute tiles a launch occupies."""
    if launch.op in ("gemv_add", "norm_gateup_swiglu", "flash_attention"):
        return ARRAY_TILES
    x, y = launch.herd
    return x * y


def gemm_us(
    p: Values,
    dims: Mapping[str, int],
    tile: Mapping[str, int],
    herd: tuple[int, int],
    method: str,
    f32_out: bool,
) -> float:
    """Return the work of the matrix product alone, without the cast launch of the fused-cast method.

    A is read once per block of columns of B and B once per block of rows of A; both share the bandwidth of
    DDR with the output. A core is bound by its calls of the micro kernel. Draining the pipe before the next
    block of columns adds to that, and so does the pass of the core over its accumulators where it casts them
    or the compiler's own kernel copies them; the external kernel's f32 sums leave by DMA as they are.
    """
    m, k, n = dims["M"], dims["K"], dims["N"]
    tile_m, tile_n, k_l2, k_l1 = tile["tile_m"], tile["tile_n"], tile["tile_k_l2"], tile["tile_k_l1"]
    row_blocks = _ceil(m, tile_m * herd[0])
    column_blocks = _ceil(n, tile_n * herd[1])
    blocks = row_blocks * column_blocks
    read = _BF16 * k * (m * column_blocks + n * row_blocks) * (1.0 + p["gemm.block_edge"] / k_l2)
    written = (_F32 if f32_out or method == "fused-cast" else _BF16) * m * n
    memory = (read + written) / p["gemm.ddr_gbps"] * 1e-3
    macs = tile_m * tile_n * k_l1 * 1e-3
    if method == "direct":
        call_ns = p["gemm.direct_call_ns"] + p["gemm.direct_ns_per_kmac"] * macs
        if not f32_out:
            call_ns += p["gemm.direct_round_ns"] * tile_m * tile_n
    else:
        call_ns = p["gemm.call_ns"] + p["gemm.ns_per_kmac"] * macs
    core = blocks * k / k_l1 * call_ns * 1e-3
    copied = 0 if method in _SUMS_LEAVE_BY_DMA else blocks * tile_m * tile_n
    store = p["gemm.store_ns"] * copied * 1e-3
    restart = p["gemm.restart_us"] * column_blocks * herd[0] / _COLUMNS / row_blocks
    return max(memory, core) + store + restart


def gemv_us(
    p: Values, m: int, k: int, tile_m: int, herd_m: int, group_limit: int, sustained_gbps: float
) -> float:
    """Return the work of a matrix-vector product: weights from DDR, in groups of descriptors.

    A group holds the largest number of launch iterations that divides their count, up to `group_limit`.
    Either the sustained rate bounds it, or a burst and the refill of the pipe; near the crossing both count.
    """
    iterations = _ceil(m, tile_m * herd_m)
    groups = iterations // largest_divisor(iterations, group_limit)
    share = min(1.0, herd_m / _COLUMNS)
    us_per_group = _BF16 * m * k / groups * 1e-3 / share
    burst = p["gemv.group_us"] + us_per_group / p["gemv.burst_gbps"]
    sustained = us_per_group / sustained_gbps
    return float(groups * (burst**8 + sustained**8) ** 0.125)


def _elementwise_us(p: Values, n: int, cores: int, ns: float, traffic: int) -> float:
    return max(n / cores * ns, traffic / p["stream.ddr_gbps"]) * 1e-3


def _attention_us(p: Values, launch: LaunchLike) -> float:
    d, t = launch.dims, launch.tile
    head_dim = d["head_dim"]
    dv_tile = t.get("dv_tile", min(head_dim, 64 if head_dim <= 128 else 128))
    per_unroll = int(str(launch.attrs.get("heads_per_unroll", 2)))
    stages = int(str(launch.attrs.get("num_cascade_stages", 4)))
    blocks = _ceil(d["q_heads"], per_unroll) * _ceil(d["lq"], t.get("lqp", 256)) * _ceil(head_dim, dv_tile)
    column_ns = p["attention.softmax_ns"] + p["attention.product_ns"] * (head_dim + dv_tile) / 128
    # two stages instead of four are published as about 25 % slower
    slower = math.pow(4 / stages, math.log2(1.25))
    mask = p["attention.mask_us"] if launch.attrs.get("causal") else 0.0
    return blocks * (p["attention.block_us"] + mask + d["lk"] * column_ns * 1e-3 * slower)


def work_us(
    p: Values,
    launch: LaunchLike,
    group_limit: int = PROGRAM_GROUP,
    gemv_gbps: float | None = None,
    table: bool = True,
) -> float:
    """Return the work of one launch, without loading it.

    `group_limit` and `gemv_gbps` say how a matrix-vector product is built (see `gemv_us`), by default as
    inside a program; `table` applies the table of exceptions. Raises ValueError for an operation without a
    model.
    """
    d, t, op = launch.dims, launch.tile, launch.op
    cores = tiles(launch)
    exception = factor(launch) if table else 1.0
    if op == "gemm":
        f32 = launch.method == "external" or launch.attrs.get("output_dtype") == "f32"
        us = gemm_us(p, d, t, launch.herd, launch.method, f32) * exception
        if launch.method == "fused-cast":
            us += reload_us(p, CAST_TILES) + _CAST_BYTES * d["M"] * d["N"] / p["stream.ddr_gbps"] * 1e-3
        return us
    if op == "gemv":
        rate = (
            (p["gemv.pingpong_gbps"] if d["K"] < PINGPONG_K else p["gemv.ddr_gbps"])
            if gemv_gbps is None
            else gemv_gbps
        )
        return gemv_us(p, d["M"], d["K"], t.get("tile_m", 8), launch.herd[0], group_limit, rate)
    if op == "gemv_add":
        return gemv_us(p, d["M"], d["K"], t.get("tile_m", 8), _COLUMNS, group_limit, p["gemv.pingpong_gbps"])
    if op == "norm_gateup_swiglu":
        return (
            gemv_us(
                p,
                2 * d["hidden"],
                d["emb"],
                t.get("tile_m", 8),
                _COLUMNS,
                group_limit,
                p["gemv.pingpong_gbps"],
            )
            + _ceil(d["emb"], 1) * p["norm.rms_ns"] * 1e-3
        )
    if op == "rms_norm":
        return _ceil(d["M"], cores) * d["N"] * p["norm.rms_ns"] * 1e-3 * exception
    if op == "layer_norm":
        return _ceil(d["M"], cores) * d["N"] * p["norm.layer_ns"] * 1e-3
    if op == "rope":
        return _ceil(d["rows"], cores) * (p["rope.row_ns"] + d["head_dim"] * p["rope.element_ns"]) * 1e-3
    if op == "flash_attention":
        return _attention_us(p, launch)
    if op == "eltwise_add":
        return _elementwise_us(p, d["n"], cores, p["stream.add_ns"], 3 * _BF16 * d["n"])
    if op == "bias_add":
        n = d["rows"] * d["n"]
        return _elementwise_us(p, n, cores, p["stream.bias_ns"], 2 * _BF16 * n)
    if op == "silu_mul":
        return _elementwise_us(p, d["n"], cores, p["stream.silu_mul_ns"], 3 * _BF16 * d["n"])
    if op == "gelu":
        return _elementwise_us(p, d["n"], cores, p["stream.gelu_ns"], 2 * _BF16 * d["n"])
    raise ValueError(f"timing: no model for the operation {op!r}")


def reload_us(p: Values, count: int) -> float:
    """Return what it takes to load a launch that occupies `count` compute tiles."""
    return p["program.reload_us"] + p["program.reload_us_per_tile"] * count


_FILLS = {
    "gemv": "gemv.fill_us",
    "gemv_add": "gemv.fill_us",
    "norm_gateup_swiglu": "gemv.fill_us",
    "rms_norm": "norm.fill_us",
    "layer_norm": "norm.fill_us",
    "rope": "rope.fill_us",
    "eltwise_add": "stream.fill_us",
    "bias_add": "stream.fill_us",
    "silu_mul": "stream.fill_us",
    "gelu": "stream.fill_us",
}


_ONE_STREAM = frozenset({"bias_add", "gelu"})
"""Kernels with one long input: it arrives while the launch is still being loaded."""


_ONE_ROW = frozenset({"gemv", "gemv_add", "norm_gateup_swiglu"})


def one_row(launches: Iterable[LaunchLike]) -> bool:
    """Return whether a program works on one row: it multiplies matrices with vectors."""
    return any(launch.op in _ONE_ROW for launch in launches)


def loaded_us(p: Values, launch: LaunchLike, in_one_row: bool = False, table: bool = True) -> float:
    """Return loading, first fill and work of one launch inside a program.

    `in_one_row` says that the program works on one row: its other launches load as fast as its products.
    `table` applies the table of exceptions.
    """
    work = work_us(p, launch, table=table)
    if launch.op == "flash_attention":
        return p["attention.load_us"] + work
    fill = None if launch.op in _ONE_STREAM else _FILLS.get(launch.op)
    loading = reload_us(p, tiles(launch))
    if in_one_row or launch.op in _ONE_ROW:
        loading *= p["program.one_row_load_ratio"]
    return loading + (p[fill] if fill else 0.0) + work


def program_ratio(p: Values, launches: Iterable[LaunchLike]) -> float:
    """Return how much longer the launches of a program take between the other programs of a model.

    Attention has a ratio of its own; programs of one row, which wait for weights, have none.
    """
    ops = {launch.op for launch in launches}
    if "flash_attention" in ops:
        return p["model.attention_ratio"]
    return 1.0 if ops & _ONE_ROW else p["model.program_ratio"]


def launches_us(p: Values, launches: Sequence[LaunchLike]) -> list[float]:
    """Return the time of every launch of a program between the other programs of a model."""
    ratio, narrow = program_ratio(p, launches), one_row(launches)
    return [ratio * loaded_us(p, launch, narrow) for launch in launches]


def alone_us(p: Values, launch: LaunchLike, table: bool = True) -> float:
    """Return the run time of a kernel that is a program of its own, as the registry measures it.

    The fused-cast GEMM consists of two launches, attention sets up channels: they are loaded at every run.
    The others are measured from a binary that holds one configuration of the array and needs no loading.
    """
    if launch.op == "flash_attention" or launch.method == "fused-cast":
        return p["program.start_us"] + loaded_us(p, launch, table=table)
    fill = _FILLS.get(launch.op)
    work = work_us(p, launch, STANDALONE_GROUP, p["gemv.ddr_gbps"], table)
    return p["program.start_us"] + (p[fill] if fill else 0.0) + work
