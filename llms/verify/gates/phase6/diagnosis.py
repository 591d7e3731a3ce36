"""Where two sides part: cosine and error per layer, for prefill and for decode.

Decode is compared under teacher forcing: both sides are fed the tokens of the reference, so that a row of the
table speaks of the arithmetic of its layer and not of another text. A layer or path that one side does not
give is listed as missing with the reason; nothing is left out in silence. The table informs, it has no
limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llms.verify.contract.capture import DiagnosisCapture
from llms.verify.contract.records import Array
from llms.verify.reference.hf import ReferenceRun

Path = Literal["prefill", "decode"]
Probe = Literal["ffn_out", "final_norm"]
# Rules of thumb of the mlir-air LLM examples for where to look first; they localise, they do not judge.
SUSPECT_COSINE = 0.85
SUSPECT_DROP = 0.05
_RELATIVE_FLOOR = 1e-6
NOT_OFFERED = "not offered"
"""Begins the reason of a missing row that the runner lacks the ability for; nothing is wrong with it."""


@dataclass(frozen=True)
class LayerRow:
    """One row: statistics over positions (prefill) or steps (decode).

    ``cos_*`` aggregate the cosine over the feature axis per position; a zero vector counts 0. Errors are over
    all elements, relative ones against ``max(|reference|, 1e-6)``. Values that are not finite make the row
    NaN. ``layer`` of the final norm is the number of layers.
    """

    layer: int
    path: Path
    probe: Probe
    cos_min: float
    cos_p5: float
    cos_median: float
    cos_mean: float
    max_abs: float
    mean_abs: float
    max_rel: float
    mean_rel: float


@dataclass(frozen=True)
class MissingRow:
    """A row that could not be made, and why."""

    layer: int
    path: Path
    probe: Probe
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """The table, what is missing from it, and what is odd about the record itself."""

    rows: tuple[LayerRow, ...]
    missing: tuple[MissingRow, ...]
    problems: tuple[str, ...]

    def select(self, path: Path, probe: Probe = "ffn_out") -> tuple[LayerRow, ...]:
        """Return the rows of one path and probe in layer order."""
        return tuple(row for row in self.rows if row.path == path and row.probe == probe)

    def first_suspect(self, path: Path) -> LayerRow | None:
        """Return the first layer below 0.85, or more than 0.05 below its predecessor, by its 5th percentile.

        The worst position is no guide: where a token carries a massive activation, a correct device dips to
        0.79 at that single position (SmolLM2-135M on the twin, prefill of layer 11, median 0.998).
        """
        before = 1.0
        for row in self.select(path):
            if not row.cos_p5 >= SUSPECT_COSINE or before - row.cos_p5 > SUSPECT_DROP:
                return row
            before = row.cos_p5
        return None


def cosines(left: Array, right: Array) -> Array:
    """Return the cosine over the last axis (float64): 0 for a zero vector, NaN for one that is not finite."""
    a, b = np.asarray(left).astype(np.float64), np.asarray(right).astype(np.float64)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    products = np.einsum("...i,...i->...", a, b)
    with np.errstate(invalid="ignore", divide="ignore"):
        result: Array = np.where(norms == 0, 0.0, products / norms)
    return result


def layer_row(layer: int, path: Path, probe: Probe, npu: Array, reference: Array) -> LayerRow:
    """Compare two arrays ``[positions, features]``.

    Raises:
        ValueError: the shapes differ.
    """
    if npu.shape != reference.shape:
        raise ValueError(f"shapes differ: npu {npu.shape}, reference {reference.shape}")
    a, b = npu.astype(np.float64), reference.astype(np.float64)
    if not np.isfinite(a).all() or not np.isfinite(b).all():
        return LayerRow(layer, path, probe, *([float("nan")] * 8))
    cosine = cosines(a, b)
    error = np.abs(a - b)
    relative = error / np.maximum(np.abs(b), _RELATIVE_FLOOR)
    return LayerRow(
        layer,
        path,
        probe,
        cos_min=float(cosine.min()),
        cos_p5=float(np.percentile(cosine, 5)),
        cos_median=float(np.median(cosine)),
        cos_mean=float(cosine.mean()),
        max_abs=float(error.max()),
        mean_abs=float(error.mean()),
        max_rel=float(relative.max()),
        mean_rel=float(relative.mean()),
    )


def identical_layers(layers: Sequence[Array]) -> tuple[tuple[int, int], ...]:
    """Return pairs of layers with bitwise equal output: views of one buffer, or a layer that did nothing."""
    seen: dict[bytes, int] = {}
    pairs = []
    for index, values in enumerate(layers):
        if values.size == 0:
            continue
        first = seen.setdefault(np.ascontiguousarray(values).tobytes(), index)
        if first != index:
            pairs.append((first, index))
    return tuple(pairs)


def diagnose(capture: DiagnosisCapture, reference: ReferenceRun) -> Diagnosis:
    """Compare the inside view of a device with a reference run of the same prompt and the same fed tokens.

    Raises:
        ValueError: the capture was fed other tokens than the reference.
    """
    if capture.decode_offered and capture.fed != reference.fed:
        raise ValueError("capture and reference were fed different tokens: force the tokens of the reference")
    table = _Table()
    n_layers = reference.prefill_layers.shape[0]

    given = [layer.get("ffn_out") for layer in capture.prefill.layer_intermediates]
    for index in range(n_layers):
        values = given[index] if index < len(given) else None
        if index == n_layers - 1 and len(given) == n_layers and capture.prefill.layer_intermediates[-1] == {}:
            # What the contract leaves out; the row of the final norm sees this layer.
            reason = f"{NOT_OFFERED}: the record has the last layer behind the final norm only"
            table.lack(index, "prefill", "ffn_out", reason)
            continue
        table.add(index, "prefill", "ffn_out", values, reference.prefill_layers[index])
    if len(given) > n_layers:
        table.problems.append(f"prefill: the npu recorded {len(given)} layers, the model has {n_layers}")
    table.add(n_layers, "prefill", "final_norm", capture.prefill.final_hidden_normed, reference.prefill_final)
    for first, second in identical_layers([values for values in given if values is not None]):
        table.problems.append(
            f"prefill: layers {first} and {second} are bitwise equal: records are views of a reused buffer, "
            f"or layer {second} did nothing"
        )

    for index in range(n_layers + 1):
        probe: Probe = "ffn_out" if index < n_layers else "final_norm"
        if not capture.decode_offered:
            table.lack(index, "decode", probe, f"{NOT_OFFERED}: the runner has no decode_step_probed")
        elif not reference.fed:
            table.lack(index, "decode", probe, "no decode steps were run")
        elif probe == "ffn_out":
            stacked = _stack([_layer(one.layer_intermediates, index) for one in capture.decode])
            table.add(index, "decode", probe, stacked, reference.decode_layers[:, index])
        else:
            stacked = _stack([one.final_hidden_normed for one in capture.decode])
            table.add(index, "decode", probe, stacked, reference.decode_final)
    return Diagnosis(tuple(table.rows), tuple(table.missing), tuple(table.problems))


class _Table:
    def __init__(self) -> None:
        self.rows: list[LayerRow] = []
        self.missing: list[MissingRow] = []
        self.problems: list[str] = []

    def lack(self, layer: int, path: Path, probe: Probe, reason: str) -> None:
        self.missing.append(MissingRow(layer, path, probe, reason))

    def add(self, layer: int, path: Path, probe: Probe, npu: Array | None, reference: Array) -> None:
        if npu is None or npu.size == 0:
            self.lack(layer, path, probe, "not recorded by the npu side")
            return
        try:
            row = layer_row(layer, path, probe, npu, reference)
        except ValueError as error:
            self.lack(layer, path, probe, str(error))
            self.problems.append(f"{path} layer {layer} {probe}: {error}")
            return
        self.rows.append(row)
        if np.isnan(row.cos_min):
            self.problems.append(f"{path} layer {layer} {probe}: values that are not finite")


def _layer(layers: list[dict[str, Array]], index: int) -> Array | None:
    return layers[index].get("ffn_out") if index < len(layers) else None


def _stack(parts: list[Array | None]) -> Array | None:
    present = [part for part in parts if part is not None and part.size]
    if len(present) != len(parts) or not present or len({part.shape for part in present}) != 1:
        return None
    return np.stack(present)
