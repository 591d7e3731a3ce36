"""What norms share on float-only cores (Xilinx/mlir-air e972f2942: weighted_rms_norm, layer_norm).

Sums of squares run in 16 f32 lanes, the width of the core's vector, which are then added pairwise. Statistics
and every product round to bf16 in the core's mode.
"""

from __future__ import annotations

import numpy as np

from npu_twin.bf16 import F32
from npu_twin.datapath._steps import Step, scratch
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
