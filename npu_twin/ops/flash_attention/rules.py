"""Rules of FlashAttention: place in the array, lengths, tiles by head dimension, layouts."""

from __future__ import annotations

from npu_twin.npu2 import COLUMNS
from npu_twin.opset import Finding, Findings, LaunchLike

TILE_KEYS = ("lqp", "lkp", "num_q_tiles")
CASCADE_STAGES = (4, 2)
DEFAULT_STAGES = 4


def dv_tile(launch: LaunchLike) -> int:
    """Width of the value tile in elements; up to head_dim 128 it is 64 unless the launch says otherwise."""
    head_dim = launch.dims["head_dim"]
    return launch.tile.get("dv_tile", 64 if head_dim <= 128 else 128)


def check(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one attention launch."""
    d, t, a = launch.dims, launch.tile, launch.attrs
    lq, lk, hd, qh, kvh = (d[k] for k in ("lq", "lk", "head_dim", "q_heads", "kv_heads"))
    lqp, lkp, nqt = (t[k] for k in TILE_KEYS)
    hpu, stages = a.get("heads_per_unroll", 1), a.get("num_cascade_stages", DEFAULT_STAGES)
    causal = bool(a.get("causal", False))
    if hpu * nqt > COLUMNS:
        yield Finding(
            "F1",
            f"heads_per_unroll*num_q_tiles needs {hpu * nqt} of {COLUMNS} columns",
            {"heads_per_unroll": hpu, "num_q_tiles": nqt},
        )
    if hpu not in (1, 2):
        yield Finding("S6", "more than two heads exhaust the shim channels", {"heads_per_unroll": hpu})
    if stages not in CASCADE_STAGES:
        yield Finding(
            "F2", "the cascade has 4 (or 2) stages, one row of cores each", {"num_cascade_stages": stages}
        )
    if lq % lqp or lk % lkp or lk % (stages * lkp):
        yield Finding(
            "F3",
            f"lq must be a multiple of lqp, lk one of lkp*num_cascade_stages = {stages * lkp}",
            {"lq": lq, "lqp": lqp, "lk": lk, "lkp": lkp, "num_cascade_stages": stages},
        )
    if lqp % nqt:
        yield Finding(
            "F5", "lqp must be a multiple of num_q_tiles", {"lqp": lqp, "num_q_tiles": nqt}, "build"
        )
        return
    tile_q = lqp // nqt
    if causal and (lq != lk or tile_q != lkp):
        yield Finding(
            "F4",
            "causal attention needs lq == lk and lqp/num_q_tiles == lkp",
            {"lq": lq, "lk": lk, "lqp": lqp, "num_q_tiles": nqt, "lkp": lkp},
        )
    yield from _tile_q(hd, tile_q)
    yield from _head_dim(launch, hd, lkp)
    if qh % kvh or qh % hpu:
        yield Finding(
            "F11",
            "q_heads must be a multiple of kv_heads and of heads_per_unroll",
            {"q_heads": qh, "kv_heads": kvh, "heads_per_unroll": hpu},
        )
    window = a.get("window")
    if window and (not causal or window % lkp):
        yield Finding("F12", "a window needs causal and is a multiple of lkp", {"window": window, "lkp": lkp})
    if a.get("omit_infinite_loop", False):
        yield Finding("F13", "with the infinite loop omitted the kernel hangs", {"omit_infinite_loop": True})
    built_for = a.get("object")
    if built_for:
        now = {"tile_q": tile_q, "lkp": lkp, "dv_tile": dv_tile(launch), "head_dim": hd}
        other = {k: v for k, v in built_for.items() if now.get(k) != v}
        if other:
            yield Finding(
                "F14",
                "the kernel object was compiled for other sizes per tile",
                {**{f"object {k}": v for k, v in other.items()}, **{k: now.get(k) for k in other}},
            )
    tiling = a.get("runtime_tiling")
    if tiling is not None and hd // dv_tile(launch) > 1 and len(tiling) != 3:
        yield Finding("F15", "the launch has three dimensions here", {"runtime_tiling": tuple(tiling)})
    if "F20" in switches and hd >= 128 and lk > 2048:
        yield Finding(
            "F20", "time-outs are reported for long sequences at this width", {"lk": lk, "head_dim": hd}
        )


def _tile_q(hd: int, tile_q: int) -> Findings:
    wanted = 64 if hd <= 128 else 32
    if tile_q == wanted:
        return
    hangs = tile_q < wanted
    what = "hangs" if hangs else "overflows L1"
    yield Finding(
        "F5",
        f"tile_q = lqp/num_q_tiles must be {wanted} at head_dim {hd}; {tile_q} {what}",
        {"head_dim": hd, "tile_q": tile_q},
        "hang" if hangs else "compile",
    )


def _head_dim(launch: LaunchLike, hd: int, lkp: int) -> Findings:
    dv = dv_tile(launch)
    if hd % lkp or hd % dv or dv % 8:
        yield Finding(
            "F6",
            "head_dim must be a multiple of lkp and of dv_tile, dv_tile one of 8",
            {"head_dim": hd, "lkp": lkp, "dv_tile": dv},
        )
    if launch.method == "seq_first" and hd > 64:
        yield Finding(
            "F7", "the sequence-first kernel hangs above head_dim 64; use head_first", {"head_dim": hd}
        )
    if hd >= 256 and (lkp > 32 or dv > 128):
        yield Finding(
            "F10",
            "lkp 64 or dv_tile 256 does not fit L1 at head_dim 256",
            {"head_dim": hd, "lkp": lkp, "dv_tile": dv},
        )
