"""GELU in the tanh form (Xilinx/mlir-air e972f2942, gelu).

A float-only core: it rounds in the reset mode unless the launch says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from npu_twin.datapath._steps import Step
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.tables import gelu_table
from npu_twin.listing import Launch
from npu_twin.memory import OperandView
from npu_twin.ops import _streams
from npu_twin.opset import Config, Dims, Findings, LaunchLike, Op, Signature, Values, read, write

TILE = (512, 6144)


def signature(d: Dims, method: str, tile: Mapping[str, int]) -> Signature:
    """Operands: x, out, each [n]."""
    return {"x": read(d["n"]), "out": write(d["n"])}


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[n] = gelu(x[n]), read from its table."""
    x, out = operands["x"].u16, operands["out"].u16
    table = gelu_table(choice.rounding_of(launch.rounding), choice.tanh)
    take = np.take

    def run() -> None:
        take(table, x, out=out, mode="clip")

    return run


def check(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one GELU."""
    yield from _streams.check_channels(launch, "S3", 1)
    yield from _streams.check_tiles(launch, "E4", "tile_n", *TILE)


def space(d: Dims, method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    """The largest tiles; one stream per core leaves channels for sixteen cores."""
    return _streams.tile_space("gelu", "tanh_direct_codegen", d, "tile_n", TILE, 16)


def work(p: Values, launch: LaunchLike, alone: bool) -> float:
    """One operand in, one out."""
    return _streams.stream_us(p, launch, launch.dims["n"], "gelu_ns", 2)


OP = Op(
    ("n",),
    signature,
    prepare,
    check,
    space,
    work,
    tile_keys=("tile_n",),
    fill="stream.fill_us",
    one_stream=True,
)
