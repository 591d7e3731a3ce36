"""Fitting the timing parameters on measured rows, and judging a fit by what it has not seen.

Each kernel is fitted on its own rows with a robust loss, every problem size counting once. Cross-validation
leaves out one size at a time, with all its tiles, herds and duplicate measurements, and predicts it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from npu_twin.opset import Values
from npu_twin.timing import optimise, predictor
from npu_twin.timing.exceptions import entry_of
from npu_twin.timing.models import ModelRecord, nearest
from npu_twin.timing.parameters import DEFINITIONS, ROWS, starts
from npu_twin.timing.rows import ALONE, IN_PROGRAM, Row, predict_us

SMALL_US = 130.0
"""Below this the fixed costs dominate and absolute errors count."""
_SMALL_SCALE_US = 200.0
SCALE = 0.05
POWER = 0.5


@dataclass(frozen=True)
class Stage:
    """Parameters that are fitted together, and the rows they are fitted on."""

    name: str
    kernels: tuple[str, ...]
    scopes: tuple[str, ...]
    parameters: tuple[str, ...]

    def takes(self, row: Row) -> bool:
        """Return whether `row` takes part in this stage."""
        wanted = row.scope in self.scopes and (
            row.kernel == self.name or row.scope != ALONE or self.name != "gemm"
        )
        return wanted and row.kernel in self.kernels and not row.doubt and entry_of(row.call) is None


_BIAS = "stream.bias_ns"
"""Published only inside programs, hence fitted with what loading them costs."""


def _names(*groups: str) -> tuple[str, ...]:
    return tuple(
        p.name for p in DEFINITIONS if p.group in groups and p.provenance == ROWS and p.name != _BIAS
    )


STAGES: tuple[Stage, ...] = (
    Stage("gemv", ("gemv",), (ALONE,), _names("gemv")),
    Stage("stream", ("eltwise_add", "silu_mul", "gelu"), (ALONE,), _names("stream")),
    Stage("rope", ("rope",), (ALONE,), _names("rope")),
    Stage("norm", ("rms_norm", "layer_norm"), (ALONE,), _names("norm")),
    Stage("attention", ("flash_attention",), (ALONE,), _names("attention")),
    Stage(
        "gemm",
        ("gemm", "eltwise_add", "bias_add", "gelu", "layer_norm"),
        (ALONE, IN_PROGRAM),
        (*_names("gemm"), _BIAS, "program.start_us", "program.reload_us", "program.reload_us_per_tile"),
    ),
)


def _residuals(p: Values, used: Sequence[Row], weights: Mapping[tuple[object, ...], float]) -> list[float]:
    out = []
    for row in used:
        predicted = predict_us(p, row)
        if row.measured_us < SMALL_US:
            error = (predicted - row.measured_us) / _SMALL_SCALE_US
        else:
            error = math.log(predicted / row.measured_us)
        out.append(error * weights[row.shape])
    return out


def fit_stage(
    stage: Stage, used: Iterable[Row], fixed: Values, start: Values | None = None
) -> dict[str, float]:
    """Return the parameters of one stage fitted on `used`, with all others as in `fixed`."""
    chosen = [row for row in used if stage.takes(row)]
    counts = Counter(row.shape for row in chosen)
    weights = {shape: count**-POWER for shape, count in counts.items()}
    base = dict(fixed)

    def residuals(values: Mapping[str, float]) -> list[float]:
        base.update(values)
        return _residuals(base, chosen, weights)

    first = {name: (start or fixed)[name] for name in stage.parameters}
    return optimise.fit(residuals, first, SCALE)


def fit_rows(used: Sequence[Row]) -> dict[str, float]:
    """Return all parameters, those of the kernels fitted on `used`."""
    values = starts()
    for _ in range(2):  # the fills depend on the start of a program, which the GEMM rows fix
        for stage in STAGES:
            values.update(fit_stage(stage, used, values))
    return values


def cross_validate(used: Sequence[Row], values: Values) -> dict[str, float]:
    """Return for each row id the prediction of a model that has not seen any row of the same size.

    A row under an entry of the table of exceptions that is judged is predicted without the entry.
    """
    predictions: dict[str, float] = {}
    for stage in STAGES:
        members = [row for row in used if stage.takes(row)]
        for shape in dict.fromkeys(row.shape for row in members):
            kept = [row for row in members if row.shape != shape]
            fold = dict(values)
            if kept:
                fold.update(fit_stage(stage, kept, values))
            predictions.update({row.id: predict_us(fold, row) for row in members if row.shape == shape})
    for row in used:
        if row.id not in predictions:
            entry = entry_of(row.call)
            predictions[row.id] = predict_us(values, row, table=entry is None or not entry.judged)
    return predictions


MODEL_PARAMETERS = (
    "gemv.pingpong_gbps",
    "program.one_row_load_ratio",
    "host.copy_gbps",
    "model.program_ratio",
    "model.attention_ratio",
)
_DEVICE_KINDS: tuple[str, ...] = ("elf", "bo_write", "bo_read")
_PROGRAM_WEIGHT = 0.5
_DEVICE_WEIGHT = 0.7
MODEL_SCALE = 0.1


def _model_residuals(values: Values, records: Sequence[ModelRecord]) -> list[float]:
    out = []
    for record in records:
        ttft, decode, parts = predictor.times(values, record.sizes, record.seq_len)
        if record.ttft_s:
            out.append(math.log(ttft / nearest(record.ttft_s, ttft)))
        if record.decode_ms:
            out.append(math.log(decode / nearest(record.decode_ms, decode)))
        if record.device_s:
            device = (
                sum(p.total_ms for p in parts if p.section == "prefill" and p.kind in _DEVICE_KINDS) * 1e-3
            )
            out.append(_DEVICE_WEIGHT * math.log(device / record.device_s))
        if record.between_calls_ms:
            host = sum(
                p.total_ms
                for p in parts
                if p.section == "prefill" and (p.name == "array copies" or p.name.startswith("dispatch"))
            )
            out.append(_DEVICE_WEIGHT * math.log(host / record.between_calls_ms))
        weight = _PROGRAM_WEIGHT / math.sqrt(max(1, len(record.programs)))
        for program in record.programs:
            counted = _DEVICE_KINDS if program.with_writes else _DEVICE_KINDS[:1]
            ms = sum(
                part.per_call_ms
                for part in parts
                if part.section == program.section and part.name == program.program and part.kind in counted
            )
            if ms:
                out.append(weight * math.log(ms / program.ms))
    return out


def fit_models(records: Sequence[ModelRecord], values: Values) -> dict[str, float]:
    """Return the constants that models share, fitted on `records`, with the kernels as in `values`."""
    base = dict(values)

    def residuals(candidate: Mapping[str, float]) -> list[float]:
        base.update(candidate)
        return _model_residuals(base, records)

    return optimise.fit(residuals, {name: values[name] for name in MODEL_PARAMETERS}, MODEL_SCALE)


def cross_validate_models(records: Sequence[ModelRecord], values: Values) -> dict[str, tuple[float, float]]:
    """Return for each model ttft_s and decode_ms_per_token by constants fitted on the other models."""
    predictions = {}
    for record in records:
        others = [other for other in records if other.id != record.id]
        fold = {**values, **fit_models(others, values)} if others else dict(values)
        ttft, decode, _ = predictor.times(fold, record.sizes, record.seq_len)
        predictions[record.id] = (ttft, decode)
    return predictions
