"""RMSNorm and LayerNorm on float-only cores (Xilinx/mlir-air e972f2942: weighted_rms_norm, layer_norm).

Sums of squares run in 16 f32 lanes, the width of the core's vector, which are then added pairwise. Statistics
and every product round to bf16 in the core's mode.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from npu_twin.bf16 import F32, U16, nearest_even, round_f32, widen
from npu_twin.datapath._steps import Step, round_into, row_blocks, scratch, sequence, upper
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.listing import Launch
from npu_twin.memory import OperandView

LANES = 16
"""Lanes of the f32 vector unit: the running sum of a row is 16 running sums."""

DEFAULT_EPS = 1e-5
"""Epsilon compiled into the published norm kernels."""


def _check_lanes(launch: Launch, width: int) -> None:
    if width % LANES:
        raise ValueError(
            f"launch {launch.name}: rows of {width} elements are not a multiple of the {LANES} vector lanes; "
            f"pad the row to a multiple of {LANES}"
        )


def prepare_rms_norm(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[M, N] = x * rsqrt(mean(x**2) + eps) * w, rows independent; attribute ``eps`` defaults to 1e-5.

    Method ``weighted`` sums in f32. ``weighted_bf16_sum`` is the one-row norm of the published fused decode
    program, whose bf16 running sum falls short and scales the row up by several percent.
    """
    x, w, out = (operands[name].u16 for name in ("x", "w", "out"))
    _check_lanes(launch, x.shape[1])
    rounding = choice.rounding_of(launch.rounding)
    eps = float(launch.attrs.get("eps", DEFAULT_EPS))
    if launch.method == "weighted_bf16_sum" and choice.bf16_sum == "hw":
        return _rms_norm_bf16_sum(x, w, out, eps, rounding)
    return sequence(rms_norm_steps(x, w, out, eps, rounding))


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


def prepare_layer_norm(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[M, N] = (x - mean) * rsqrt(var + eps) * w + b; mean, difference, rstd and normed value round to
    bf16, the affine step is one f32 multiply-add and one rounding.
    """
    x, w, b, out = (operands[name].u16 for name in ("x", "w", "b", "out"))
    _check_lanes(launch, x.shape[1])
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
