"""Latencies of kernels and models: predicted against measured, per row and per kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from npu_twin.opset import Values
from npu_twin.timing import fit, predictor
from npu_twin.timing.exceptions import entry_of
from npu_twin.timing.models import ModelFile, ModelRecord, nearest
from npu_twin.timing.parameters import current
from npu_twin.timing.rows import Row, Unjudged, predict_us
from npu_twin.validate import limits


@dataclass(frozen=True)
class RowResult:
    """Prediction and error of one row.

    Attributes:
        row: the measurement.
        predicted_us: time by the model.
        excepted: why it is not judged, empty for most.
        doubt: why it took part in no fit though it is judged, empty for most.
    """

    row: Row
    predicted_us: float
    excepted: str = ""
    doubt: str = ""

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted_us / self.row.measured_us - 1.0

    @property
    def judged_error(self) -> float:
        """Error that counts against the limits."""
        return limits.relative_error(self.predicted_us, self.row.measured_us)


@dataclass(frozen=True)
class KernelResult:
    """Errors of one kernel or family and whether they keep their limits."""

    name: str
    results: tuple[RowResult, ...]
    unjudged: tuple[Unjudged, ...]
    judged: bool = True

    @property
    def counted(self) -> tuple[RowResult, ...]:
        """The rows that are judged."""
        return tuple(r for r in self.results if not r.excepted)

    @property
    def missing(self) -> tuple[Unjudged, ...]:
        """Rows that could not be judged, which counts as missed."""
        return tuple(u for u in self.unjudged if not u.excused)

    @property
    def shapes(self) -> int:
        """Number of different problem sizes among the judged rows."""
        return len({tuple(sorted(r.row.call.dims.items())) for r in self.counted})

    def quantile(self, share: float) -> float:
        """Quantile of the errors, 0 without rows."""
        errors = [r.judged_error for r in self.counted]
        return limits.quantile(errors, share) if errors else 0.0

    @property
    def limit_text(self) -> str:
        """The limits that apply."""
        if not self.judged:
            return "-"
        found = limits.LATENCY.get(self.name)
        if found is None or self.shapes < limits.FEW_SHAPES:
            return f"each {limits.ROW_LIMIT:.0%}"
        return f"{found.median:.0%} / {found.p90:.0%}"

    def failures(self) -> list[str]:
        """Say which limits are missed."""
        if not self.judged:
            return []
        out = [f"{self.name}: row {u.id} could not be judged: {u.reason}" for u in self.missing]
        found = limits.LATENCY.get(self.name)
        if found is None or self.shapes < limits.FEW_SHAPES:
            out += [
                f"{self.name}: row {r.row.id} is off by {r.error:+.1%}, limit {limits.ROW_LIMIT:.0%}"
                for r in self.counted
                if r.judged_error > limits.ROW_LIMIT
            ]
            return out
        for label, value, limit in (
            ("median", self.quantile(0.5), found.median),
            ("90th percentile", self.quantile(0.9), found.p90),
        ):
            if value > limit:
                out.append(f"{self.name}: {label} error {value:.1%}, limit {limit:.0%}")
        return out


def judge_rows(
    used: Sequence[Row],
    unjudged: Sequence[Unjudged],
    predictions: Mapping[str, float],
    calibrated_on: bool = True,
) -> list[KernelResult]:
    """Return the results by kernel, and by family where kernels are judged together.

    `calibrated_on` says that the rows are those the model was calibrated on: then rows under the table of
    exceptions, which come from them, are no evidence and not judged. Rows of others are, table included.
    """
    results: dict[str, list[RowResult]] = {}
    for row in used:
        entry = entry_of(row.call) if calibrated_on else None
        result = RowResult(
            row,
            predictions[row.id],
            excepted=entry.reason if entry and not entry.judged else "",
            doubt=entry.reason if entry and entry.judged else row.doubt,
        )
        results.setdefault(row.kernel, []).append(result)
    others: dict[str, list[Unjudged]] = {}
    for item in unjudged:
        others.setdefault(item.kernel, []).append(item)
    names = list(dict.fromkeys([*results, *others]))
    out = [
        KernelResult(n, tuple(results.get(n, ())), tuple(others.get(n, ())), n not in limits.FAMILIES)
        for n in names
    ]
    for family in dict.fromkeys(limits.FAMILIES.values()):
        members = [k for k in out if limits.FAMILIES.get(k.name) == family]
        if members:
            out.append(
                KernelResult(
                    family,
                    tuple(r for k in members for r in k.results),
                    tuple(u for k in members for u in k.unjudged),
                )
            )
    return out


def cross_validated(used: Sequence[Row]) -> dict[str, float]:
    """Return the predictions of models that have not seen the size of the row they predict."""
    return fit.cross_validate(used, fit.fit_rows(used))


def shipped(used: Iterable[Row]) -> dict[str, float]:
    """Return the predictions with the parameters as shipped."""
    p = current()
    return {row.id: predict_us(p, row) for row in used}


@dataclass(frozen=True)
class ModelResult:
    """Predicted and measured times of one model."""

    record: ModelRecord
    ttft_s: float
    decode_ms: float
    seconds: float

    def figures(self) -> dict[str, tuple[float, float, int]]:
        """Return predicted, nearest published figure and number of published figures, by quantity."""
        out: dict[str, tuple[float, float, int]] = {}
        if self.record.ttft_s:
            published = self.record.ttft_s
            out["ttft_s"] = (self.ttft_s, nearest(published, self.ttft_s), len(published))
        if self.record.decode_ms:
            published = self.record.decode_ms
            out["decode_ms_per_token"] = (self.decode_ms, nearest(published, self.decode_ms), len(published))
        return out


@dataclass(frozen=True)
class ModelsResult:
    """Errors of the model-level predictor and whether they keep their limits."""

    results: tuple[ModelResult, ...]
    unjudged: tuple[tuple[str, str], ...] = field(default=())
    left_out: tuple[tuple[str, str], ...] = field(default=())

    def median(self, quantity: str) -> float:
        """Median error of a quantity, 0 without models."""
        errors = [
            abs(f[quantity][0] / f[quantity][1] - 1.0) for r in self.results if quantity in (f := r.figures())
        ]
        return statistics.median(errors) if errors else 0.0

    def failures(self) -> list[str]:
        """Say which limits are missed."""
        out = [f"model {identity} could not be judged: {reason}" for identity, reason in self.unjudged]
        if not self.results:
            out.append("models: there is none with bf16 weights and figures to judge")
        for result in self.results:
            for quantity, (predicted, published, _) in result.figures().items():
                error = predicted / published - 1.0
                if abs(error) > limits.MODEL_EACH:
                    text = f"{quantity} is off by {error:+.1%}, limit {limits.MODEL_EACH:.0%}"
                    out.append(f"{result.record.id}: {text}")
            if result.seconds > limits.CALL_TIME_LIMIT_S:
                out.append(f"{result.record.id}: the prediction took {result.seconds:.1f} s")
        for quantity, limit in limits.MODEL_MEDIAN.items():
            if self.median(quantity) > limit:
                out.append(
                    f"models: median error of {quantity} {self.median(quantity):.1%}, limit {limit:.0%}"
                )
        return out


def judge_models(found: ModelFile, folds: Mapping[str, tuple[float, float]] | None = None) -> ModelsResult:
    """Return the results of the models, with cross-validated times (`folds`) or else those as shipped."""
    p: Values = current()
    results = []
    for record in found.records:
        start = time.perf_counter()
        ttft, decode, _ = predictor.times(p, record.sizes, record.seq_len)
        seconds = time.perf_counter() - start
        if folds is not None:
            ttft, decode = folds[record.id]
        results.append(ModelResult(record, ttft, decode, seconds))
    return ModelsResult(tuple(results), tuple(found.unjudged), tuple(found.left_out))


def cross_validated_models(records: Sequence[ModelRecord]) -> dict[str, tuple[float, float]]:
    """Return the times of each model by constants that are fitted on the other models."""
    return fit.cross_validate_models(records, current())
