"""Steps of the norms on float-only cores (Xilinx/mlir-air e972f2942: weighted_rms_norm, layer_norm).

Sums of squares run in 16 f32 lanes, the width of the core's vector, which are then added pairwise. Statistics
and every product round to bf16 in the core's mode.
"""

from __future__ import annotations

import numpy as np

from npu_twin.bf16 import F32, U16
from npu_twin.datapath._steps import Step, round_into, row_blocks, scratch, upper
from npu_twin.listing import Launch

LANES = 16
"""Lanes of the f32 vector unit: the running sum of a row is 16 running sums."""

DEFAULT_EPS = 1e-5
"""Epsilon compiled into the published norm kernels."""


def check_lanes(launch: Launch, width: int) -> None:
    """Raise ValueError unless rows of ``width`` elements fill the vector lanes."""
    if width % LANES:
        raise ValueError(
            f"launch {launch.name}: rows of {width} elements are not a multiple of the {LANES} vector lanes; "
            f"pad the row to a multiple of {LANES}"
        )


def rms_norm_steps(x: U16, w: U16, out: U16, eps: float, rounding: str) -> list[Step]:
    """Steps of the f32-sum RMSNorm of x[M, N] with weight w[N] into ``out`` (bits, any strides)."""
    weight = scratch("wide.norm.w", (x.shape[1],))
    top = upper(weight)

    def load_weight() -> None:
        np.copyto(top, w)

    steps: list[Step] = [load_weight]
    for part in row_blocks(*x.shape):
        steps.append(_rms_block(x[part], weight, out[part], eps, rounding))
    return steps


def _rms_block(x: U16, weight: F32, out: U16, eps: float, rounding: str) -> Step:
    shape, column = x.shape, (x.shape[0], 1)
    wide, work, wide_t = (scratch(n, shape) for n in ("wide.norm.x", "norm.t", "wide.norm.t"))
    mean, wide_r = scratch("norm.mean", column), scratch("wide.norm.r", column)
    top = upper(wide)
    sum_lanes = lane_sum(work, mean)
    round_r = round_into(mean, upper(wide_r), rounding, "norm.round1")
    round_t = round_into(work, upper(wide_t), rounding)
    store = round_into(work, out, rounding)
    length, epsilon, one = np.float32(shape[1]), np.float32(eps), np.float32(1)
    copyto, multiply, divide, add, sqrt = np.copyto, np.multiply, np.divide, np.add, np.sqrt

    def run() -> None:
        copyto(top, x)
        multiply(wide, wide, out=work)
        sum_lanes()
        divide(mean, length, out=mean)
        add(mean, epsilon, out=mean)
        sqrt(mean, out=mean)
        divide(one, mean, out=mean)
        round_r()
        multiply(wide, wide_r, out=work)
        round_t()
        multiply(wide_t, weight, out=work)
        store()

    return run


def lane_sum(values: F32, out: F32) -> Step:
    """Closure: out[R, 1] = sum of values[R, N] in 16 f32 lanes, lane j taking elements j, j + 16, ...;
    then lane j + 8 is added to lane j, and so on down to one.
    """
    rows = values.shape[0]
    groups = values.reshape(rows, -1, LANES)
    lanes = scratch("norm.lanes", (rows, LANES))
    halves = [(lanes[:, :h], lanes[:, h : 2 * h]) for h in (8, 4, 2)]
    first, second = lanes[:, :1], lanes[:, 1:2]
    reduce, add = np.add.reduce, np.add

    def run() -> None:
        reduce(groups, axis=1, out=lanes)
        for low, high in halves:
            add(low, high, out=low)
        add(first, second, out=out)

    return run
