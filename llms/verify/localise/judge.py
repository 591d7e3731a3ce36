"""One result of one kernel against two expectations: plain fp32, and the device's arithmetic.

Both are computed from the device's own inputs of that kernel and the checkpoint's weights, so that an earlier
fault is not seen again. The fp32 reference is that of the kernel harness. How far a correct kernel is from it
is not a constant but what the matched arithmetic (no code in common with the twin)
gives on the very same inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from llms.verify.contract.records import Array

# A kernel is what it should be when its error is at most 1.3 times the expected one, when it is no further
# from the matched arithmetic than a seventh of that error, and when no element is off by 6 %. Measured on the
# twin (tiny Qwen2.5 and Qwen3, SmolLM2-135M, prefill and decode, 128 rows): clean 1.00 times, and 2e-6 from
# the matched arithmetic at most; a down projection in the low-precision tier 3.9e-3 from it (K = 512).
ERROR_FACTOR, ERROR_FLOOR = 1.3, 4e-4
DISTANCE_FACTOR, DISTANCE_FLOOR = 0.15, 5e-4
LARGEST_ELEMENT = 0.06


SELECTION = "token selection"
LOOP = (SELECTION, "cache state", "prompt ids", "prompt length")
"""Names in the place of a kernel's: parts of the host's loop around the layers."""


@dataclass(frozen=True)
class Row:
    """One comparison.

    kind: `kernel` (a launch), `host` (work between ELFs, KV cache) or `static` (a weight or table on the
    device). step is -1 for prefill. error, expected, distance are mean_rel_L1: device against fp32, matched
    arithmetic against fp32, device against matched arithmetic.
    """

    path: str
    step: int
    layer: int
    kernel: str
    result: str
    kind: str
    ok: bool
    cosine: float = 1.0
    error: float = 0.0
    expected: float = 0.0
    distance: float = 0.0
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able fields; numbers that are not finite become None."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in vars(self).items()
        }

    @property
    def where(self) -> str:
        """Path, step and layer in words."""
        step = f" step {self.step}" if self.step >= 0 else ""
        return f"{self.path}{step}, layer {self.layer}"


def wide(array: Array) -> Array:
    """bf16 or f32 -> f64."""
    values = np.asarray(array)
    return values if values.dtype == np.float64 else values.astype(np.float32).astype(np.float64)


def cosine(a: Array, b: Array) -> float:
    """Cosine over all elements; NaN when a value is not finite, 1 for two zero arrays."""
    x, y = wide(a).ravel(), wide(b).ravel()
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return math.nan
    sizes = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / sizes if sizes else float(not x.any() and not y.any())


def relative(a: Array, b: Array) -> float:
    """mean|a - b| / mean|b|."""
    x, y = wide(a), wide(b)
    return float(np.abs(x - y).mean() / (np.abs(y).mean() + 1e-30))


def compare(device: Array, reference: Array, matched: Array) -> tuple[bool, dict[str, float], str]:
    """Judge one result: (ok, figures for a Row, why not)."""
    got, want, plain = wide(device), wide(matched), wide(reference)
    figures = {
        "cosine": cosine(got, plain),
        "error": relative(got, plain),
        "expected": relative(want, plain),
        "distance": relative(got, want),
    }
    if not np.isfinite(got).all():
        return False, figures, "values that are not finite"
    size = np.abs(want) + math.sqrt(float(np.mean(want * want))) + 1e-30
    off = np.abs(got - want) / size
    limit = ERROR_FACTOR * figures["expected"] + ERROR_FLOOR
    near = DISTANCE_FACTOR * figures["expected"] + DISTANCE_FLOOR
    problems = []
    if not figures["error"] <= limit:
        problems.append(
            f"error {figures['error']:.2e}, expected {figures['expected']:.2e}, limit {limit:.2e}"
        )
    if not figures["distance"] <= near:
        problems.append(f"{figures['distance']:.2e} from the device's arithmetic, limit {near:.2e}")
    if not off.max() <= LARGEST_ELEMENT:
        place = tuple(int(i) for i in np.unravel_index(int(off.argmax()), off.shape))
        bad = int((off > LARGEST_ELEMENT).sum())
        problems.append(
            f"{bad} of {off.size} elements off by more than {LARGEST_ELEMENT:.0%}, worst at {place}"
        )
    return not problems, figures, "; ".join(problems)
