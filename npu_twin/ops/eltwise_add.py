"""Element-wise addition: out = a + b (Xilinx/mlir-air e972f2942, eltwise_add).

A float-only core: f32 sums, one rounding each, in the reset mode unless the launch says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from npu_twin.datapath._steps import Step
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.passes import added
from npu_twin.listing import Launch
from npu_twin.memory import OperandView
from npu_twin.ops import _streams
from npu_twin.opset import Config, Dims, Finding, Findings, LaunchLike, Op, Signature, Values, read, write

TILE_MAX = 4096
ZERO_TAIL = frozenset({(245760, 2048, 8)})
"""(n, tile, cores) for which everything after the first two tiles stays zero (mlir-air e972f2942, kernel
registry, EltwiseAdd_bf16.md); no formula explains it."""


def signature(d: Dims, method: str, tile: Mapping[str, int]) -> Signature:
    """Operands: a, b, out, each [n]."""
    return {"a": read(d["n"]), "b": read(d["n"]), "out": write(d["n"])}


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[n] = a[n] + b[n]."""
    a, b, out = (operands[name].u16 for name in ("a", "b", "out"))
    return added(a, b, out, choice.rounding_of(launch.rounding))


def check(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one element-wise add."""
    yield from _streams.check_channels(launch, "S1", 2)
    yield from _streams.check_tiles(launch, "E1", "tile", 16, TILE_MAX)
    n, tile = launch.dims["n"], launch.tile["tile"]
    if (n, tile, _streams.cores(launch)) in ZERO_TAIL:
        yield Finding("E2", "everything after the first two tiles stays zero", {"n": n, "tile": tile})


def space(d: Dims, method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    """The largest tiles."""
    return _streams.tile_space("eltwise_add", "default", d, "tile", (16, TILE_MAX), 8)


def work(p: Values, launch: LaunchLike, alone: bool) -> float:
    """Two operands in, one out."""
    return _streams.stream_us(p, launch, launch.dims["n"], "add_ns", 3)


OP = Op(("n",), signature, prepare, check, space, work, tile_keys=("tile",), fill="stream.fill_us")
