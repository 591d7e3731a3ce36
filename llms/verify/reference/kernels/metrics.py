"""Error figures as the published kernel registry defines them (Xilinx/mlir-air e972f2942)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llms.verify.contract.records import Array


@dataclass(frozen=True)
class Metrics:
    """Error of an output against its reference.

    ``mean_rel_L1`` = mean|out - ref| / (mean|ref| + 1e-30) in float64; ``rel_err_max`` over non-zero
    references; ``abs_err_max``. A NaN anywhere makes all three NaN.
    """

    mean_rel_L1: float  # noqa: N815 - the field's published name
    rel_err_max: float
    abs_err_max: float


@dataclass(frozen=True)
class Offenders:
    """Elements that break the gate |out - ref| <= atol + rtol * |ref|; a non-finite error breaks it too.

    ``indices`` are flat, ``abs_errors`` in the same order; ``worst`` is the largest excess over the limit.
    """

    count: int
    total: int
    indices: tuple[int, ...]
    abs_errors: tuple[float, ...]
    worst: float

    @property
    def fraction(self) -> float:
        """Share of the elements that break the gate."""
        return self.count / self.total if self.total else 0.0


def _errors(out: Array, ref: Array) -> tuple[Array, Array]:
    if np.shape(out) != np.shape(ref):
        raise ValueError(f"output has shape {np.shape(out)}, reference {np.shape(ref)}")
    wide = np.asarray(ref).astype(np.float64)
    error = np.asarray(out).astype(np.float64)
    np.subtract(error, wide, out=error)
    np.abs(error, out=error)
    return error, np.abs(wide, out=wide)


def compare(out: Array, ref: Array) -> Metrics:
    """Metrics of ``out`` against ``ref`` (same shape). Raises ValueError for different shapes."""
    error, size = _errors(out, ref)
    nonzero = size > 0
    relative = float(np.max(error[nonzero] / size[nonzero])) if nonzero.any() else 0.0
    if np.isnan(error).any():
        relative = float("nan")
    return Metrics(float(error.mean() / (size.mean() + 1e-30)), relative, float(error.max()))


def offenders(out: Array, ref: Array, *, rtol: float, atol: float, keep: int = 100) -> Offenders:
    """Elements beyond the tolerance; at most ``keep`` of them are listed, in order of position."""
    error, size = _errors(out, ref)
    excess = error - (atol + rtol * size)
    bad = np.flatnonzero(~(excess.ravel() <= 0))
    worst = float(excess.ravel()[bad].max()) if bad.size else 0.0
    listed = bad[:keep]
    return Offenders(
        int(bad.size),
        int(error.size),
        tuple(int(i) for i in listed),
        tuple(float(e) for e in error.ravel()[listed]),
        worst,
    )
