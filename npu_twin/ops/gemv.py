"""Matrix times vector, the product of the decode path (Xilinx/mlir-air e972f2942, mv.cc).

Sums are f32 without a block format, in running sums as a vector unit has them
(:class:`fixed_order.products.Gemv`), and round once. The cascade kernels share rules and cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fixed_order.products import Gemv
from npu_twin.bf16 import NEAREST_EVEN
from npu_twin.datapath._steps import Step, round_into, scratch, sequence
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.listing import Launch
from npu_twin.memory import OperandView
from npu_twin.npu2 import COLUMNS, L1_BYTES, L2_BYTES, MAX_REPEAT
from npu_twin.ops._streams import BF16, ceil_div, divisors
from npu_twin.opset import Config, Dims, Finding, Findings, LaunchLike, Op, Signature, Values, read, write

CASCADE_CHUNK = 512
"""Length along K that one pass of the cascade kernels covers; a row of cores each takes one."""
CASCADE_STAGES = (2, 3, 4)
LOOP_TILINGS = (4, 16)
"""Runtime loop tilings in use: 4 in the standalone harness, 16 in the ELFs of the models."""
LM_HEAD_ROWS = 8192
LM_HEAD_LEAST = 4096
"""Smallest matrix that is taken for a partition of a language-model head where its shape matters (V6)."""
STACK_BYTES = 1024
"""Default stack of a core; it shares L1 with the buffers."""
STANDALONE_GROUP = 4
"""Descriptors that the runtime of a kernel of its own keeps in flight; programs are built with 16."""
PROGRAM_GROUP = 16
PINGPONG_K = 8192
"""From this width on two copies of the rows do not fit L1 and a product runs without double buffers."""
USUAL_TILES = (2, 4, 8, 16)
"""Values of tile_m in the published rows."""


def signature(d: Dims, method: str, tile: Mapping[str, int]) -> Signature:
    """Operands: w [M, K], x [K], out [M]."""
    return {"w": read(d["M"], d["K"]), "x": read(d["K"]), "out": write(d["M"])}


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[M] = w[M, K] @ x[K], one rounding."""
    w, x, out = (operands[name].u16 for name in ("w", "x", "out"))
    rounding = choice.rounding_of(launch.rounding)
    if rounding == NEAREST_EVEN:
        return Gemv(w, x, out)
    total = scratch("gemv.total", (w.shape[0],))
    return sequence([Gemv(w, x, total), round_into(total, out, rounding)])


def l1_bytes(K: int, tile_m: int, m_input: int, ping_pong: bool = False) -> int:
    """L1 of one core in bytes: matrix rows (twice with ping-pong over several steps), x, output, stack."""
    copies = 2 if ping_pong and tile_m > m_input else 1
    return copies * 2 * m_input * K + 2 * K + 2 * tile_m + STACK_BYTES


def splittable(iterations: int) -> bool:
    """Whether the launch loop fits the repeat limit directly or after the runtime loop tiling."""
    return iterations <= MAX_REPEAT or any(
        iterations % f == 0 and iterations // f <= MAX_REPEAT for f in LOOP_TILINGS
    )


def check(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one GEMV launch."""
    M, K = launch.dims["M"], launch.dims["K"]
    tm, mi = launch.tile["tile_m"], launch.tile["m_input"]
    hm = launch.herd[0]
    if K % 64:
        yield Finding("V1", "K must be a multiple of the 64 lanes", {"K": K})
    yield from check_rows(M, tm, mi, hm)
    need = 2 * hm * tm * K + 2 * hm * tm
    if need > L2_BYTES:
        yield Finding(
            "V3",
            f"the tiles of all cores need {need} bytes, L2 has {L2_BYTES}",
            {"herd_m": hm, "tile_m": tm, "K": K, "bytes": need},
        )
    yield from check_l1(launch, ping_pong=False)
    iterations, repeats = M // (tm * hm), M // (hm * mi) - 1
    if not splittable(iterations):
        yield Finding(
            "B3",
            f"{iterations} launch iterations exceed {MAX_REPEAT} and no loop tiling "
            f"({' or '.join(map(str, LOOP_TILINGS))}) brings them below; split M into partitions",
            {"M": M, "tile_m": tm, "herd_m": hm, "iterations": iterations},
        )
    # With tile_m == m_input the repeat is the launch loop itself, which the loop tiling splits (B3):
    # 49152x2048 at 8/8 runs with 768 iterations.
    if tm > mi and repeats > MAX_REPEAT:
        yield Finding(
            "B2",
            f"the input vector repeats {repeats} times, a queue push allows {MAX_REPEAT}",
            {"M": M, "herd_m": hm, "m_input": mi, "repeats": repeats},
        )
        if hm == COLUMNS and mi == 4:
            yield Finding(
                "B4",
                f"an LM-head partition at herd 8, m_input 4 has at most {LM_HEAD_ROWS} rows",
                {"M": M, "rows": LM_HEAD_ROWS},
            )
    if K == 4096 and hm == 4 and M >= LM_HEAD_LEAST:
        yield Finding("V6", "this herd compiles and then hangs; herd_m must be 8", {"K": K, "herd_m": hm})
    built_for = launch.attrs.get("object")
    if built_for and built_for.get("tile_m", tm) != tm:
        yield Finding(
            "V7",
            "the kernel object was compiled for another tile_m",
            {"tile_m": tm, "object tile_m": built_for["tile_m"]},
        )


def check_l1(launch: LaunchLike, ping_pong: bool) -> Findings:
    """V4 for one GEMV; with ``ping_pong`` the matrix rows are held twice."""
    K, tm, mi = launch.dims["K"], launch.tile["tile_m"], launch.tile["m_input"]
    need = l1_bytes(K, tm, mi, ping_pong)
    if need > L1_BYTES:
        yield Finding(
            "V4",
            f"one core needs {need} bytes, L1 has {L1_BYTES}",
            {"K": K, "tile_m": tm, "m_input": mi, "ping_pong": ping_pong, "bytes": need},
        )


def check_rows(M: int, tm: int, mi: int, hm: int) -> Findings:
    """Whether the tiles divide the rows of the matrix."""
    if M % (tm * hm) or tm % mi:
        yield Finding(
            "V2",
            f"M must be a multiple of tile_m*herd_m = {tm * hm}, and tile_m one of m_input",
            {"M": M, "tile_m": tm, "herd_m": hm, "m_input": mi},
        )
    if tm % 2:
        yield Finding("B12", "tile_m must be even: a transfer is a multiple of 4 bytes", {"tile_m": tm})


def space(d: Dims, method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    """Even tiles over as many columns as divide the rows, with one, two or four steps each."""
    M = d["M"]
    for hm in range(COLUMNS, 0, -1):
        for tm in divisors(M // hm, 64, 2) if M % hm == 0 else []:
            for mi in (tm, tm // 2, tm // 4):
                if mi and tm % mi == 0:
                    yield Config("gemv", "external", d, {"tile_m": tm, "m_input": mi}, (hm, 1))


def _is_usual(config: Config) -> bool:
    return config.tile["tile_m"] in USUAL_TILES


def largest_divisor(count: int, limit: int) -> int:
    """Return the largest divisor of `count` that is not above `limit`."""
    for divisor in range(min(count, limit), 1, -1):
        if count % divisor == 0:
            return divisor
    return 1


def gemv_us(
    p: Values, m: int, k: int, tile_m: int, herd_m: int, group_limit: int, sustained_gbps: float
) -> float:
    """Return the work of a matrix-vector product: weights from DDR, in groups of descriptors.

    A group holds the largest number of launch iterations that divides their count, up to `group_limit`.
    Either the sustained rate bounds it, or a burst and the refill of the pipe; near the crossing both count.
    """
    iterations = ceil_div(m, tile_m * herd_m)
    groups = iterations // largest_divisor(iterations, group_limit)
    share = min(1.0, herd_m / COLUMNS)
    us_per_group = BF16 * m * k / groups * 1e-3 / share
    burst = p["gemv.group_us"] + us_per_group / p["gemv.burst_gbps"]
    sustained = us_per_group / sustained_gbps
    return float(groups * (burst**8 + sustained**8) ** 0.125)


def cascade_us(p: Values, m: int, k: int, launch: LaunchLike, alone: bool) -> float:
    """Return the work of a product in the cascade form, which uses all columns."""
    group = STANDALONE_GROUP if alone else PROGRAM_GROUP
    return gemv_us(p, m, k, launch.tile.get("tile_m", 8), COLUMNS, group, p["gemv.pingpong_gbps"])


def work(p: Values, launch: LaunchLike, alone: bool) -> float:
    """A kernel of its own has no double buffers, nor has one whose rows do not fit L1 twice."""
    d = launch.dims
    rate = p["gemv.ddr_gbps" if alone or d["K"] >= PINGPONG_K else "gemv.pingpong_gbps"]
    group = STANDALONE_GROUP if alone else PROGRAM_GROUP
    return gemv_us(p, d["M"], d["K"], launch.tile.get("tile_m", 8), launch.herd[0], group, rate)


OP = Op(
    ("M", "K"),
    signature,
    prepare,
    check,
    space,
    work,
    methods=("external",),
    rounding=NEAREST_EVEN,
    tile_keys=("tile_m", "m_input"),
    fill="gemv.fill_us",
    one_row=True,
    usual=_is_usual,
)
