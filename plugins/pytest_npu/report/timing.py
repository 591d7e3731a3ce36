"""TTFT and time per output token of a run, from a `profile` record or from its benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .model import RunReport
from .values import number

#: Parts of test names that say what a benchmark measures, for tests that do not pass `metric`.
_NAMES = {"ttft": ("ttft", "first_token"), "tpot": ("tpot", "per_output_token")}


@dataclass(frozen=True)
class Timing:
    """Times in ms, `tps` in tokens/s; None for what was not measured. `rows` is the breakdown of both."""

    clock: str
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tps: float | None = None
    seq_len: int | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)


def timing_of(report: RunReport) -> Timing | None:
    """The last profile record of a run; without one, the medians of its TTFT and TPOT benchmarks."""
    profiles = report.records_of("profile")
    if profiles:
        payload = profiles[-1]["payload"]
        return Timing(
            str(payload.get("clock") or report.device_label),
            number(payload.get("ttft_ms")),
            number(payload.get("tpot_ms")),
            number(payload.get("tps")),
            payload.get("seq_len"),
            payload.get("breakdown") or [],
        )
    payloads = {
        metric: record["payload"]
        for record in report.records_of("benchmark")
        if (metric := _metric(record["payload"]))
    }
    if not payloads:
        return None
    tpot = _median_ms(payloads.get("tpot"))
    last = list(payloads.values())[-1]
    return Timing(
        str(last.get("device") or report.device_label),
        _median_ms(payloads.get("ttft")),
        tpot,
        1e3 / tpot if tpot else None,
        last.get("seq_len"),
        [
            row
            for payload in payloads.values()
            for row in payload.get("breakdown") or []
            if isinstance(row, dict)
        ],
    )


def _metric(payload: Mapping[str, Any]) -> str | None:
    if payload.get("metric") in _NAMES:
        return str(payload["metric"])
    name = str(payload.get("name"))
    return next((metric for metric, parts in _NAMES.items() if any(part in name for part in parts)), None)


def _median_ms(payload: Mapping[str, Any] | None) -> float | None:
    median = number(payload.get("median")) if payload is not None else None
    return None if median is None else 1e3 * median
