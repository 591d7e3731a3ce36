"""The limits that the twin must keep, and how a set of errors is held against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALL_US = 130.0
"""Rows below this are dominated by fixed costs..."""
SMALL_TOLERANCE_US = 15.0
"""...and count as right within this."""
FEW_SHAPES = 6
"""A kernel with fewer sizes is judged row by row..."""
ROW_LIMIT = 0.10
"""...each within this."""


@dataclass(frozen=True)
class Limits:
    """Largest median and 90th percentile of the relative errors of a kernel."""

    median: float
    p90: float


LATENCY: dict[str, Limits] = {
    "gemm": Limits(0.05, 0.15),
    "gemv": Limits(0.03, 0.06),
    "elementwise": Limits(0.03, 0.09),
    "rope": Limits(0.03, 0.09),
    "rms_norm": Limits(0.04, 0.10),
    "flash_attention": Limits(0.06, 0.15),
}
FAMILIES: dict[str, str] = {
    "eltwise_add": "elementwise",
    "bias_add": "elementwise",
    "silu_mul": "elementwise",
    "gelu": "elementwise",
}
"""Kernels that stream their operands and share their parameters are judged together, and shown one by one."""
MODEL_EACH = 0.12
MODEL_MEDIAN = {"ttft_s": 0.05, "decode_ms_per_token": 0.08}
CALL_TIME_LIMIT_S = 5.0


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile with linear interpolation between neighbours. Raises ValueError when empty."""
    if not values:
        raise ValueError("quantile of no values")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def relative_error(predicted: float, measured: float) -> float:
    """Return the relative error that counts: 0 for a short run that is right within the fixed tolerance."""
    difference = abs(predicted - measured)
    if measured < SMALL_US and difference <= SMALL_TOLERANCE_US:
        return 0.0
    return difference / measured
