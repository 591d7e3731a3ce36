"""Rotary embedding of rows (Xilinx/mlir-air e972f2942, rope_halfsplit and rope_lut).

A float-only core: f32 products and sums, one rounding, in the reset mode unless the launch says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from npu_twin.datapath._steps import Step
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.passes import rotated
from npu_twin.listing import Launch
from npu_twin.memory import OperandView
from npu_twin.ops import _streams
from npu_twin.opset import Config, Dims, Finding, Findings, LaunchLike, Op, Signature, Values, read, write


def signature(d: Dims, method: str, tile: Mapping[str, int]) -> Signature:
    """Operands: x, table [cos half | sin half], out, each [rows, head_dim]."""
    shape = (d["rows"], d["head_dim"])
    return {"x": read(*shape), "table": read(*shape), "out": write(*shape)}


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """Rotate the pairs of each row by the angles of its table row [cos half | sin half].

    Pairs are (i, i + half) in method ``half_split`` and (2i, 2i + 1) in method ``interleaved``. Raises
    ValueError for an odd head dimension.
    """
    x, table, out = (operands[name].u16 for name in ("x", "table", "out"))
    width = x.shape[1]
    if width % 2:
        raise ValueError(f"launch {launch.name}: head_dim={width} is odd, rotary embedding turns pairs")
    return rotated(x, table, out, launch.method == "half_split", choice.rounding_of(launch.rounding))


def check(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one RoPE launch."""
    yield from _streams.check_channels(launch, "S2", 2)
    rows, hd, cores = launch.dims["rows"], launch.dims["head_dim"], _streams.cores(launch)
    if hd % 16 or rows % cores:
        yield Finding(
            "E6",
            "head_dim must be a multiple of the 16 lanes, rows one of the cores",
            {"rows": rows, "head_dim": hd, "cores": cores},
        )
    per_transfer = launch.tile.get("rows_per_dma", launch.attrs.get("rows_per_dma", 1))
    if per_transfer != 1:
        # Two rows fail to run; four give zeros or NaN without an error.
        yield Finding(
            "E6",
            "exactly one row per transfer",
            {"rows_per_dma": per_transfer},
            "silent" if per_transfer > 2 else "build",
        )


def space(d: Dims, method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    """Herds that divide the rows."""
    return _streams.row_space("rope", method or "half_split", d, "rows", any_herd=True)


def work(p: Values, launch: LaunchLike, alone: bool) -> float:
    """Rows of one core, each with its descriptors."""
    d = launch.dims
    row_ns = p["rope.row_ns"] + d["head_dim"] * p["rope.element_ns"]
    return _streams.ceil_div(d["rows"], _streams.cores(launch)) * row_ns * 1e-3


OP = Op(
    ("rows", "head_dim"),
    signature,
    prepare,
    check,
    space,
    work,
    methods=("half_split", "interleaved"),
    fill="rope.fill_us",
)
