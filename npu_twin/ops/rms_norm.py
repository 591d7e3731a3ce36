"""Weighted RMSNorm of rows (Xilinx/mlir-air e972f2942, weighted_rms_norm)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from npu_twin.bf16 import U16, nearest_even, round_f32, widen
from npu_twin.datapath._steps import Step, round_into
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.norms import DEFAULT_EPS, LANES, check_lanes
from npu_twin.datapath.passes import rms_normed
from npu_twin.listing import Launch
from npu_twin.memory import OperandView
from npu_twin.ops import _streams
from npu_twin.opset import Config, Dims, Findings, LaunchLike, Op, Signature, Values, read, write


def signature(d: Dims, method: str, tile: Mapping[str, int]) -> Signature:
    """Operands: x, out [M, N] and the weight w [N]."""
    M, N = d["M"], d["N"]
    return {"x": read(M, N), "w": read(N), "out": write(M, N)}


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[M, N] = x * rsqrt(mean(x**2) + eps) * w, rows independent; attribute ``eps`` defaults to 1e-5.

    Method ``weighted`` sums in f32. ``weighted_bf16_sum`` is the one-row norm of the published fused decode
    program, whose bf16 running sum falls short and scales the row up by several percent.
    """
    x, w, out = (operands[name].u16 for name in ("x", "w", "out"))
    check_lanes(launch, x.shape[1])
    rounding = choice.rounding_of(launch.rounding)
    eps = float(launch.attrs.get("eps", DEFAULT_EPS))
    if launch.method == "weighted_bf16_sum" and choice.bf16_sum == "hw":
        return _rms_norm_bf16_sum(x, w, out, eps, rounding)
    return rms_normed(x, w, out, eps, rounding)


def _rms_norm_bf16_sum(x: U16, w: U16, out: U16, eps: float, rounding: str) -> Step:
    """Running sums, mean and epsilon in bf16, each operation rounded. Written for one row at a time."""
    rows, length = x.shape
    inverse = widen(nearest_even(np.float32(1.0 / length)))
    epsilon = widen(nearest_even(np.float32(eps)))

    def run() -> None:
        with np.errstate(all="ignore"):
            values = widen(x)
            lanes = np.zeros((rows, LANES), np.float32)
            for start in range(0, length, LANES):
                group = values[:, start : start + LANES]
                lanes = round_f32(lanes + group * group, rounding)
            while lanes.shape[1] > 1:
                half = lanes.shape[1] // 2
                lanes = round_f32(lanes[:, :half] + lanes[:, half:], rounding)
            mean = round_f32(round_f32(lanes * inverse, rounding) + epsilon, rounding)
            rstd = round_f32(np.float32(1) / np.sqrt(mean), rounding)
            normed = round_f32(values * rstd, rounding)
            product = np.ascontiguousarray(normed * widen(w))
        round_into(product, out, rounding)()

    return run


def check(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one RMSNorm."""
    yield from _streams.check_norm(launch, "S4")


def space(d: Dims, method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    """Herds that divide the rows."""
    return _streams.row_space("rms_norm", method or "weighted", d, "M")


def work(p: Values, launch: LaunchLike, alone: bool) -> float:
    """Rows of one core."""
    d = launch.dims
    return _streams.ceil_div(d["M"], _streams.cores(launch)) * d["N"] * p["norm.rms_ns"] * 1e-3


OP = Op(
    ("M", "N"),
    signature,
    prepare,
    check,
    space,
    work,
    methods=("weighted", "weighted_bf16_sum"),
    fill="norm.fill_us",
)
