"""Rules of the GEMV, of the cascade GEMV with add and of the fused norm, gate/up and SwiGLU stage."""

from __future__ import annotations

from npu_twin.constraints._types import Findings, Found, LaunchLike
from npu_twin.constraints.rules import COLUMNS, L1_BYTES, L2_BYTES, MAX_REPEAT

CASCADE_CHUNK = 512
CASCADE_STAGES = (2, 3, 4)
DESCRIPTOR_WORDS = 1024
"""Largest descriptor dimension in 4-byte words: the size field counts from zero up to 1023."""
LOOP_TILINGS = (4, 16)
"""Runtime loop tilings in use: 4 in the standalone harness, 16 in the ELFs of the models."""
LM_HEAD_ROWS = 8192
LM_HEAD_LEAST = 4096
"""Smallest matrix that is taken for a partition of a language-model head where its shape matters (V6)."""
STACK_BYTES = 1024
"""Default stack of a core; it shares L1 with the buffers."""
TILE_KEYS = ("tile_m", "m_input")


def l1_bytes(K: int, tile_m: int, m_input: int, ping_pong: bool = False) -> int:
    """L1 of one core in bytes: matrix rows (twice with ping-pong over several steps), x, output, stack."""
    copies = 2 if ping_pong and tile_m > m_input else 1
    return copies * 2 * m_input * K + 2 * K + 2 * tile_m + STACK_BYTES


def splittable(iterations: int) -> bool:
    """Whether the launch loop fits the repeat limit directly or after the runtime loop tiling."""
    return iterations <= MAX_REPEAT or any(
        iterations % f == 0 and iterations // f <= MAX_REPEAT for f in LOOP_TILINGS
    )


def check_gemv(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one GEMV launch."""
    M, K = launch.dims["M"], launch.dims["K"]
    tm, mi = launch.tile["tile_m"], launch.tile["m_input"]
    hm = launch.herd[0]
    if K % 64:
        yield Found("V1", "K must be a multiple of the 64 lanes", {"K": K})
    yield from _divides(M, tm, mi, hm)
    need = 2 * hm * tm * K + 2 * hm * tm
    if need > L2_BYTES:
        yield Found(
            "V3",
            f"the tiles of all cores need {need} bytes, L2 has {L2_BYTES}",
            {"herd_m": hm, "tile_m": tm, "K": K, "bytes": need},
        )
    yield from check_l1(launch, ping_pong=False)
    iterations, repeats = M // (tm * hm), M // (hm * mi) - 1
    if not splittable(iterations):
        yield Found(
            "B3",
            f"{iterations} launch iterations exceed {MAX_REPEAT} and no loop tiling "
            f"({' or '.join(map(str, LOOP_TILINGS))}) brings them below; split M into partitions",
            {"M": M, "tile_m": tm, "herd_m": hm, "iterations": iterations},
        )
    # With tile_m == m_input the repeat is the launch loop itself, which the loop tiling splits (B3):
    # 49152x2048 at 8/8 runs with 768 iterations.
    if tm > mi and repeats > MAX_REPEAT:
        yield Found(
            "B2",
            f"the input vector repeats {repeats} times, a queue push allows {MAX_REPEAT}",
            {"M": M, "herd_m": hm, "m_input": mi, "repeats": repeats},
        )
        if hm == COLUMNS and mi == 4:
            yield Found(
                "B4",
                f"an LM-head partition at herd 8, m_input 4 has at most {LM_HEAD_ROWS} rows",
                {"M": M, "rows": LM_HEAD_ROWS},
            )
    if K == 4096 and hm == 4 and M >= LM_HEAD_LEAST:
        yield Found("V6", "this herd compiles and then hangs; herd_m must be 8", {"K": K, "herd_m": hm})
    built_for = launch.attrs.get("object")
    if built_for and built_for.get("tile_m", tm) != tm:
        yield Found(
            "V7",
            "the kernel object was compiled for another tile_m",
            {"tile_m": tm, "object tile_m": built_for["tile_m"]},
        )


def check_l1(launch: LaunchLike, ping_pong: bool) -> Findings:
    """V4 for one GEMV; with ``ping_pong`` the matrix rows are held twice."""
    K, tm, mi = launch.dims["K"], launch.tile["tile_m"], launch.tile["m_input"]
    need = l1_bytes(K, tm, mi, ping_pong)
    if need > L1_BYTES:
        yield Found(
            "V4",
            f"one core needs {need} bytes, L1 has {L1_BYTES}",
            {"K": K, "tile_m": tm, "m_input": mi, "ping_pong": ping_pong, "bytes": need},
        )


def _divides(M: int, tm: int, mi: int, hm: int) -> Findings:
    if M % (tm * hm) or tm % mi:
        yield Found(
            "V2",
            f"M must be a multiple of tile_m*herd_m = {tm * hm}, and tile_m one of m_input",
            {"M": M, "tile_m": tm, "herd_m": hm, "m_input": mi},
        )
    if tm % 2:
        yield Found("B12", "tile_m must be even: a transfer is a multiple of 4 bytes", {"tile_m": tm})


def check_gemv_add(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one cascade GEMV with residual add."""
    M, K = launch.dims["M"], launch.dims["K"]
    if K % CASCADE_CHUNK:
        yield Found("V9", f"the cascade is right only for multiples of {CASCADE_CHUNK} along K", {"K": K})
    yield from _divides(M, launch.tile["tile_m"], launch.tile["m_input"], launch.herd[0])
    stages = launch.attrs.get("n_cascade")
    if stages is not None and stages not in CASCADE_STAGES:
        yield Found("V10", "the cascade has 2, 3 or 4 stages, one row of cores each", {"n_cascade": stages})


def check_norm_gateup_swiglu(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of the fused decode stage."""
    emb = launch.dims["emb"]
    stages = emb // CASCADE_CHUNK if emb % CASCADE_CHUNK == 0 else None
    if stages not in CASCADE_STAGES:
        yield Found(
            "V10",
            f"the row must be 2, 3 or 4 chunks of {CASCADE_CHUNK}: one row of cores each",
            {"emb": emb, "emb/512": emb / CASCADE_CHUNK},
        )
    if emb // 2 > DESCRIPTOR_WORDS:
        yield Found(
            "B6",
            f"the row has {emb // 2} words, one descriptor dimension holds {DESCRIPTOR_WORDS}",
            {"emb": emb},
        )
