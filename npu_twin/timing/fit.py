"""Fit the timing parameters on published rows: `python -m npu_twin.timing.fit [--check]`.

Each kernel is fitted on its own rows with a robust loss, every problem size counting once. Cross-validation
leaves out one size at a time, with all its tiles, herds and duplicate measurements, and predicts it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from npu_twin.opset import Values
from npu_twin.timing import models, optimise, predictor, rows
from npu_twin.timing.exceptions import entry_of
from npu_twin.timing.models import ModelRecord, nearest
from npu_twin.timing.parameters import DATA_FILE, DEFINITIONS, ROWS, read_file, starts
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


def errors(predicted: Mapping[str, float], used: Iterable[Row]) -> dict[str, float]:
    """Return the signed relative error of each row."""
    return {row.id: predicted[row.id] / row.measured_us - 1.0 for row in used}


def fit_all(
    kernel_rows: Sequence[Row], records: Sequence[ModelRecord]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return all parameters and the expected relative errors of a model's times.

    The latter are the largest errors that a model had when its figures were left out of the fit.
    """
    values = fit_rows(kernel_rows)
    values.update(fit_models(records, values))
    folds = cross_validate_models(records, values)
    worst = {"ttft_s": 0.0, "decode_ms_per_token": 0.0}
    for record in records:
        ttft, decode = folds[record.id]
        if record.ttft_s:
            worst["ttft_s"] = max(worst["ttft_s"], abs(ttft / nearest(record.ttft_s, ttft) - 1.0))
        if record.decode_ms:
            error = abs(decode / nearest(record.decode_ms, decode) - 1.0)
            worst["decode_ms_per_token"] = max(worst["decode_ms_per_token"], error)
    return values, worst


def document(values: Values, expected: Mapping[str, float]) -> str:
    """Return the content of the parameter file."""
    fitted = {name for stage in STAGES for name in stage.parameters} | set(MODEL_PARAMETERS)
    content = {
        "title": "Physical parameters of the timing model of the digital twin",
        "written_by": "python -m npu_twin.timing.fit",
        "calibrated_on": f"{rows.PUBLISHED_KERNELS.name}, {models.PUBLISHED_MODELS.name}",
        "origin": "Xilinx/mlir-air e972f2942, snapshot 2026-08-22",
        "expected_error": {key: round(value, 3) for key, value in expected.items()},
        "parameters": [
            {
                "name": p.name,
                "value": float(f"{values[p.name]:.4g}") if p.name in fitted else p.start,
                "unit": p.unit,
                "meaning": p.meaning,
                "provenance": p.provenance,
            }
            for p in DEFINITIONS
        ],
    }
    return json.dumps(content, indent=1) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path` in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _agrees(path: Path, text: str, tolerance: float = 5e-3) -> bool:
    """Return whether a parameter file holds the same parameters, up to what another platform rounds off."""
    if not path.exists():
        return False
    old = {str(p["name"]): float(p["value"]) for p in read_file(path)["parameters"]}
    new = {str(p["name"]): float(p["value"]) for p in json.loads(text)["parameters"]}
    return old.keys() == new.keys() and all(math.isclose(old[n], new[n], rel_tol=tolerance) for n in new)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit and write the parameter file; with `--check` only compare. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m npu_twin.timing.fit", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--rows", type=Path, default=rows.PUBLISHED_KERNELS, help="kernel measurements to fit on"
    )
    parser.add_argument(
        "--models", type=Path, default=models.PUBLISHED_MODELS, help="model figures to fit on"
    )
    parser.add_argument("--output", type=Path, default=DATA_FILE, help="parameter file to write")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a value would change"
    )
    options = parser.parse_args(arguments)
    try:
        kernel_rows, _ = rows.split(rows.read_records(options.rows))
        records = models.read_models(options.models).records
    except (OSError, ValueError) as error:
        parser.error(str(error))
    values, expected = fit_all(kernel_rows, records)
    text = document(values, expected)
    if options.check:
        same = _agrees(options.output, text)
        print(f"{options.output}: {'up to date' if same else 'differs from a new fit'}")
        return 0 if same else 1
    write_atomically(options.output, text)
    print(f"{options.output}: {len(DEFINITIONS)} parameters, {len(kernel_rows)} rows, {len(records)} models")
    return 0


if __name__ == "__main__":
    sys.exit(main())
