"""Numbers of the ladder: divergence of distributions, distances of vectors, ties in ULPs. numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llms.verify.contract.records import Array
from llms.verify.gates.phase6.diagnosis import cosines


def log_softmax(logits: Array) -> Array:
    """Log probabilities over the last axis, float64; NaN in a row makes the row NaN."""
    wide = np.asarray(logits).astype(np.float64)
    with np.errstate(invalid="ignore"):
        shifted = wide - wide.max(-1, keepdims=True)
        result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def kl(reference: Array, other: Array) -> Array:
    """KL(reference || other) of logits ``[.., vocab]`` in nats, over the last axis."""
    p, q = log_softmax(reference), log_softmax(other)
    with np.errstate(invalid="ignore"):
        result: Array = np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)
    return result


def bf16_ulp(value: float) -> float:
    """Distance of neighbouring bf16 values at the size of ``value``."""
    return float(2.0 ** (np.floor(np.log2(max(abs(value), 1e-30))) - 7))


def tie_ulps(reference: Array, other: Array, reference_top: int, other_top: int) -> float:
    """How clearly two sides disagree on the first token, in bf16 ULPs at the size of the logits themselves.

    The larger of the two sides' preferences for its own choice; 0 when they agree.
    """
    if reference_top == other_top:
        return 0.0
    gaps = []
    for logits, own, theirs in ((reference, reference_top, other_top), (other, other_top, reference_top)):
        high, low = float(logits[own]), float(logits[theirs])
        gaps.append((high - low) / bf16_ulp(high))
    return max(gaps)


@dataclass(frozen=True, eq=False)
class VectorDistance:
    """Distances of vectors over the last axis; the arrays have the shape of the others.

    Attributes:
        cosine: 0 where a vector is zero, NaN where one is not finite.
        log_ratio: natural log of |ours| / |reference|; infinite where one of them is zero.
        error: |ours - reference| / |reference|.
    """

    cosine: Array
    log_ratio: Array
    error: Array


def vector_distance(ours: Array, reference: Array) -> VectorDistance:
    """Compare two arrays of vectors of one shape.

    Raises:
        ValueError: the shapes differ.
    """
    if ours.shape != reference.shape:
        raise ValueError(f"shapes differ: npu {ours.shape}, reference {reference.shape}")
    a, b = ours.astype(np.float64), reference.astype(np.float64)
    norm_a, norm_b = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where((norm_a == 0) & (norm_b == 0), 0.0, np.log(norm_a) - np.log(norm_b))
        error = np.linalg.norm(a - b, axis=-1) / np.maximum(norm_b, 1e-30)
    cosine = np.where((norm_a == 0) & (norm_b == 0), 1.0, cosines(a, b))
    return VectorDistance(cosine, ratio, error)


def worst(values: Array) -> tuple[float, tuple[int, ...]]:
    """Largest value and its index; a NaN counts as largest."""
    ranked = np.where(np.isnan(values), np.inf, values)
    index = np.unravel_index(int(np.argmax(ranked)), values.shape)
    return float(values[index]), tuple(int(i) for i in index)


def numbers(values: Array) -> Any:
    """Nested lists of floats as JSON has them: what is not finite becomes None."""
    wide = values.astype(np.float64).astype(object)
    wide[~np.isfinite(values)] = None
    return wide.tolist()


def ulp_distance(a: Array, b: Array) -> Array:
    """Distance of two arrays of bf16 values (any float dtype) in bf16 steps."""

    def ordered(x: Array) -> Array:
        bits = (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.int64)
        return np.where(bits & 0x8000, -(bits & 0x7FFF), bits)

    result: Array = np.abs(ordered(a) - ordered(b))
    return result
