"""SiLU of the gate times up (Xilinx/mlir-air e972f2942, silu_and_mul).

A float-only core: it rounds in the reset mode unless the launch says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from npu_twin.datapath._steps import Step
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.passes import scaled_by_table
from npu_twin.datapath.tables import silu_table
from npu_twin.listing import Launch
from npu_twin.memory import OperandView
from npu_twin.ops import _streams
from npu_twin.opset import Config, Dims, Finding, Findings, LaunchLike, Op, Signature, Values, read, write

TILE_MAX = 5120
DESCRIPTOR_ITERATIONS = frozenset({1024, 2048})
"""n/(tile_n*cores) that run out of descriptor ids; 512..688, 4096 and 8192 are measured to fit (mlir-air
e972f2942, kernel registry, SiLU_Mul_bf16.md); no formula explains it."""


def signature(d: Dims, method: str, tile: Mapping[str, int]) -> Signature:
    """Operands: gate, up, out, each [n]."""
    return {"gate": read(d["n"]), "up": read(d["n"]), "out": write(d["n"])}


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[n] = silu(gate[n]) * up[n]; silu is a function of one bf16 value and read from its table."""
    gate, up, out = (operands[name].u16 for name in ("gate", "up", "out"))
    rounding = choice.rounding_of(launch.rounding)
    return scaled_by_table(silu_table(rounding, choice.tanh), gate, up, out, rounding)


def check(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one SiLU-and-Mul."""
    yield from _streams.check_channels(launch, "S1", 2)
    yield from _streams.check_tiles(launch, "E3", "tile_n", 16, TILE_MAX)
    n, tile, cores = launch.dims["n"], launch.tile["tile_n"], _streams.cores(launch)
    iterations = n // (tile * cores)
    if n % (tile * cores) == 0 and iterations in DESCRIPTOR_ITERATIONS:
        values = {"n": n, "tile_n": tile, "cores": cores, "iterations": iterations}
        if n % 18944 == 0 and iterations == 1024:
            yield Finding("B16", "1024 iterations exceed the shim descriptors; split the rows in two", values)
        else:
            yield Finding("B10", f"{iterations} inner iterations exhaust the descriptor ids", values)


def space(d: Dims, method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    """The largest tiles."""
    return _streams.tile_space("silu_mul", "external", d, "tile_n", (16, TILE_MAX), 8)


def work(p: Values, launch: LaunchLike, alone: bool) -> float:
    """Two operands in, one out."""
    return _streams.stream_us(p, launch, launch.dims["n"], "silu_mul_ns", 3)


OP = Op(("n",), signature, prepare, check, space, work, tile_keys=("tile_n",), fill="stream.fill_us")
