"""LayerNorm of rows with weight and bias (Xilinx/mlir-air e972f2942, layer_norm)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from npu_twin.bf16 import F32, U16
from npu_twin.datapath._steps import Step, round_into, row_blocks, scratch, sequence, upper
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.norms import DEFAULT_EPS, check_lanes, lane_sum
from npu_twin.listing import Launch
from npu_twin.memory import OperandView
from npu_twin.ops import _streams
from npu_twin.opset import Config, Dims, Finding, Findings, LaunchLike, Op, Signature, Values, read, write


def signature(d: Dims, method: str, tile: Mapping[str, int]) -> Signature:
    """Operands: x, out [M, N], weight w and bias b [N]."""
    M, N = d["M"], d["N"]
    return {"x": read(M, N), "w": read(N), "b": read(N), "out": write(M, N)}


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[M, N] = (x - mean) * rsqrt(var + eps) * w + b; mean, difference, rstd and normed value round to
    bf16, the affine step is one f32 multiply-add and one rounding.
    """
    x, w, b, out = (operands[name].u16 for name in ("x", "w", "b", "out"))
    check_lanes(launch, x.shape[1])
    rounding = choice.rounding_of(launch.rounding)
    eps = float(launch.attrs.get("eps", DEFAULT_EPS))
    weight, bias = (scratch(n, (x.shape[1],)) for n in ("wide.norm.w", "wide.norm.b"))
    top_w, top_b = upper(weight), upper(bias)

    def load() -> None:
        np.copyto(top_w, w)
        np.copyto(top_b, b)

    steps: list[Step] = [load]
    for part in row_blocks(*x.shape):
        steps.append(_layer_block(x[part], weight, bias, out[part], eps, rounding))
    return sequence(steps)


def _layer_block(x: U16, weight: F32, bias: F32, out: U16, eps: float, rounding: str) -> Step:
    shape, column = x.shape, (x.shape[0], 1)
    wide, work, wide_d, wide_t = (
        scratch(n, shape) for n in ("wide.norm.x", "norm.t", "wide.norm.d", "wide.norm.t")
    )
    stat, wide_m, wide_r = (scratch(n, column) for n in ("norm.mean", "wide.norm.m", "wide.norm.r"))
    top = upper(wide)
    sum_x, sum_squares = lane_sum(wide, stat), lane_sum(work, stat)
    round_m = round_into(stat, upper(wide_m), rounding, "norm.round1")
    round_r = round_into(stat, upper(wide_r), rounding, "norm.round1")
    round_d = round_into(work, upper(wide_d), rounding)
    round_t = round_into(work, upper(wide_t), rounding)
    store = round_into(work, out, rounding)
    length, epsilon, one = np.float32(shape[1]), np.float32(eps), np.float32(1)

    def run() -> None:
        np.copyto(top, x)
        sum_x()
        np.divide(stat, length, out=stat)
        round_m()
        np.subtract(wide, wide_m, out=work)
        round_d()
        np.multiply(wide_d, wide_d, out=work)
        sum_squares()
        np.divide(stat, length, out=stat)
        np.add(stat, epsilon, out=stat)
        np.sqrt(stat, out=stat)
        np.divide(one, stat, out=stat)
        round_r()
        np.multiply(wide_d, wide_r, out=work)
        round_t()
        np.multiply(wide_t, weight, out=work)
        np.add(work, bias, out=work)
        store()

    return run


def check(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one LayerNorm; weight and bias must lie side by side in one argument."""
    yield from _streams.check_norm(launch, "S5")
    operands = getattr(launch, "operands", None) or {}
    if "w" in operands and "b" in operands:
        w, b, N = operands["w"], operands["b"], launch.dims["N"]
        if w.arg != b.arg or abs(w.offset - b.offset) != N:
            yield Finding(
                "S5",
                "a fourth stream does not route: pack weight and bias into one argument, one after the other",
                {"w": f"{w.arg}+{w.offset}", "b": f"{b.arg}+{b.offset}"},
            )


def space(d: Dims, method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    """Herds that divide the rows."""
    return _streams.row_space("layer_norm", "affine", d, "M")


def work(p: Values, launch: LaunchLike, alone: bool) -> float:
    """Rows of one core."""
    d = launch.dims
    return _streams.ceil_div(d["M"], _streams.cores(launch)) * d["N"] * p["norm.layer_ns"] * 1e-3


OP = Op(("M", "N"), signature, prepare, check, space, work, methods=("affine",), fill="norm.fill_us")
