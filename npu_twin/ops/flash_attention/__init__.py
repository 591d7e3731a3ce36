"""FlashAttention over a cascade of cores (Xilinx/mlir-air e972f2942, attn_npu2.cc).

This file has operands, configurations and cost; the values are in ``datapath``, the rules in ``rules``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from npu_twin.npu2 import COLUMNS
from npu_twin.ops._streams import ceil_div
from npu_twin.ops.flash_attention import rules
from npu_twin.opset import Config, Dims, LaunchLike, Op, Signature, Values, read, write

if TYPE_CHECKING:
    from npu_twin.datapath.arithmetic import Arithmetic
    from npu_twin.listing import Launch
    from npu_twin.memory import OperandView


def signature(d: Dims, method: str, tile: Mapping[str, int]) -> Signature:
    """Operands q, k, v, out. ``seq_first``: [length, heads * head_dim]; ``head_first``: [heads, length,
    head_dim], v and out in column chunks of ``dv_tile``. Raises ValueError for chunks that do not fit.
    """
    lq, lk, hd, qh, kvh = d["lq"], d["lk"], d["head_dim"], d["q_heads"], d["kv_heads"]
    if method == "seq_first":
        kv = read(lk, kvh * hd)
        return {"q": read(lq, qh * hd), "k": kv, "v": kv, "out": write(lq, qh * hd)}
    dv_tile = tile.get("dv_tile", hd)
    chunks, rest = divmod(hd, dv_tile)
    if rest:
        raise ValueError(f"head_dim {hd} is not a multiple of dv_tile {dv_tile}")
    return {
        "q": read(qh, lq, hd),
        "k": read(kvh, lk, hd),
        "v": read(kvh * chunks, lk, dv_tile),
        "out": write(qh * chunks, lq, dv_tile),
    }


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Callable[[], None]:
    """Attention of all heads; torch is imported here, not with the rules."""
    from npu_twin.ops.flash_attention import datapath

    return datapath.prepare(launch, operands, choice)


def space(d: Dims, method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    """The published query and key tiles over as many columns as there are, by layout (method)."""
    hd, causal = d["head_dim"], bool(attrs.get("causal", False))
    tile_q, lkp = (64, 64) if hd <= 128 else (32, 32)
    for layout in (method or ("seq_first" if hd <= 64 else "head_first"),):
        for stages in (4, 2):
            for hpu in (2, 1):
                for nqt in range(COLUMNS, 0, -1):
                    tile = {
                        "lqp": tile_q * nqt,
                        "lkp": lkp,
                        "num_q_tiles": nqt,
                        "dv_tile": 64 if hd <= 128 else 128,
                    }
                    attrs = {"causal": causal, "heads_per_unroll": hpu, "num_cascade_stages": stages}
                    yield Config("flash_attention", layout, d, tile, (hpu * nqt, stages), attrs)


def work(p: Values, launch: LaunchLike, alone: bool) -> float:
    """Blocks of queries, each with all keys, a mask where causal, fill and drain of the cascade."""
    d, t = launch.dims, launch.tile
    head_dim = d["head_dim"]
    dv_tile = t.get("dv_tile", min(head_dim, 64 if head_dim <= 128 else 128))
    per_unroll = int(str(launch.attrs.get("heads_per_unroll", 2)))
    stages = int(str(launch.attrs.get("num_cascade_stages", 4)))
    blocks = (
        ceil_div(d["q_heads"], per_unroll)
        * ceil_div(d["lq"], t.get("lqp", 256))
        * ceil_div(head_dim, dv_tile)
    )
    column_ns = p["attention.softmax_ns"] + p["attention.product_ns"] * (head_dim + dv_tile) / 128
    # two stages instead of four are published as about 25 % slower
    slower = math.pow(4 / stages, math.log2(1.25))
    mask = p["attention.mask_us"] if launch.attrs.get("causal") else 0.0
    return blocks * (p["attention.block_us"] + mask + d["lk"] * column_ns * 1e-3 * slower)


OP = Op(
    ("lq", "lk", "head_dim", "q_heads", "kv_heads"),
    signature,
    prepare,
    rules.check,
    space,
    work,
    methods=("seq_first", "head_first"),
    rounding="nearest_even",
    tile_keys=rules.TILE_KEYS,
    load="attention.load_us",
    whole_array=True,
)
