"""Addition of one bias row to every row (Xilinx/mlir-air e972f2942, eltwise_add with a broadcast operand)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from npu_twin.datapath._steps import Step
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.passes import added
from npu_twin.listing import Launch
from npu_twin.memory import OperandView
from npu_twin.npu2 import L1_BYTES
from npu_twin.ops import _streams
from npu_twin.opset import Config, Dims, Finding, Findings, LaunchLike, Op, Signature, Values, read, write


def signature(d: Dims, method: str, tile: Mapping[str, int]) -> Signature:
    """Operands: x, out [rows, n] and bias [n]."""
    rows, n = d["rows"], d["n"]
    return {"x": read(rows, n), "bias": read(n), "out": write(rows, n)}


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[rows, n] = x[rows, n] + bias[n]."""
    x, bias, out = (operands[name].u16 for name in ("x", "bias", "out"))
    return added(x, bias, out, choice.rounding_of(launch.rounding))


def check(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one bias add, which streams whole rows like a norm."""
    rows, n, cores = launch.dims["rows"], launch.dims["n"], _streams.cores(launch)
    yield from _streams.check_channels(launch, "S7", 2)
    if n % 16 or rows % cores:
        yield Finding(
            "E1",
            "n must be a multiple of the 16 lanes, rows one of the cores",
            {"rows": rows, "n": n, "cores": cores},
            "build",
        )
    need = 10 * n  # two copies of input and output rows, one of the bias, 2 bytes each
    if need > L1_BYTES:
        yield Finding("E1", f"the rows of one core need {need} bytes, L1 has {L1_BYTES}", {"n": n})


def space(d: Dims, method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    """Herds that divide the rows."""
    return _streams.row_space("bias_add", "default", d, "rows", any_herd=True)


def work(p: Values, launch: LaunchLike, alone: bool) -> float:
    """Rows in and out; the bias stays on the core."""
    return _streams.stream_us(p, launch, launch.dims["rows"] * launch.dims["n"], "bias_ns", 2)


OP = Op(("rows", "n"), signature, prepare, check, space, work, fill="stream.fill_us", one_stream=True)
