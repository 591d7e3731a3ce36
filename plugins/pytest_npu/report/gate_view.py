"""Views of what the gates of `llms.verify` record: the ladder's rungs, and tables of phases 0, 2, 4 and 5.

Records are read leniently, entry by entry: what a newer gate adds or leaves out costs its cell, not the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .model import RunReport
from .plots import LinePlot, number, step_plot

_STATUS_CSS = {"passed": "good", "failed": "bad"}
_RUNGS = {
    "teacher_forced": "teacher-forced continuation",
    "cache_check": "KV cache",
    "layer_check": "layer by layer",
    "edges": "rare tokens and lengths",
    "self_consistency": "self-consistency",
    "determinism": "determinism",
    "limits": "length limits",
    "plain_reference": "plain HF bf16 (coarse)",
    "silicon_vs_twin": "silicon against its twin",
}


@dataclass(frozen=True)
class Statistic:
    """One figure of a rung beside its limit; `share` is the part of the limit that is used up, in percent."""

    name: str
    value: str
    limit: str
    share: float | None
    where: str
    source: str
    css: str


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder in one phase; `closest` is the figure nearest to its limit."""

    phase: int | None
    title: str
    status: str
    css: str
    reason: str
    closest: Statistic | None
    statistics: list[Statistic]
    failures: list[str]


def rungs(report: RunReport) -> list[Rung]:
    """All rungs, by phase, in the order they were judged."""
    results = [
        _rung(_phase_of(report, record), rung)
        for record in report.records_of("ladder")
        for rung in dicts(record["payload"].get("rungs"))
    ]
    return sorted(results, key=lambda rung: 99 if rung.phase is None else rung.phase)


def _phase_of(report: RunReport, record: Mapping[str, Any]) -> int | None:
    test = report.tests.get(record.get("nodeid") or "")
    return None if test is None else test.phase


def _rung(phase: int | None, entry: Mapping[str, Any]) -> Rung:
    name, status = str(entry.get("name")), str(entry.get("status"))
    statistics = [_statistic(measured, name) for measured in dicts(entry.get("measured"))]
    judged = [one for one in statistics if one.share is not None]
    return Rung(
        phase,
        _RUNGS.get(name, name.replace("_", " ")),
        status,
        _STATUS_CSS.get(status, "muted"),
        str(entry.get("reason") or ""),
        max(judged, key=lambda one: one.share or 0.0) if judged else None,
        statistics,
        [str(line) for line in entry.get("failures") or []],
    )


def _statistic(entry: Mapping[str, Any], rung: str) -> Statistic:
    value, limit = number(entry.get("value")), number(entry.get("limit"))
    share = None if limit is None else 100.0 * (value / limit if limit and value is not None else 1.0)
    return Statistic(
        str(entry.get("statistic")).removeprefix(f"{rung}.").replace("_", " "),
        "not finite" if value is None else f"{value:.3g}",
        "" if limit is None else f"{limit:.3g}",
        share,
        str(entry.get("where") or ""),
        str(entry.get("pedigree") or ""),
        "good" if entry.get("ok", True) else "bad",
    )


def cache_limits(report: RunReport, nodeid: Any) -> dict[str, float]:
    """Largest distance of the cosine to 1 that the cache check of one test allows, by tensor."""
    names = {"cache_check.key_cosine": "k", "cache_check.value_cosine": "v"}
    return {
        names[entry["statistic"]]: limit
        for ladder in report.records_of("ladder")
        if ladder.get("nodeid") == nodeid
        for rung in dicts(ladder["payload"].get("rungs"))
        for entry in dicts(rung.get("measured"))
        if entry.get("statistic") in names and (limit := number(entry.get("limit"))) is not None
    }


def divergence_plot(report: RunReport) -> LinePlot | None:
    """KL(reference || NPU) per step of the teacher-forced continuation, of the last phase that has one."""
    records = report.records_of("teacher_forced")
    if not records:
        return None
    prompts = dicts(records[-1]["payload"].get("prompts"))
    return step_plot([(f"prompt {prompt.get('index')}", prompt.get("kl") or []) for prompt in prompts])


def gate_tables(report: RunReport) -> Iterator[tuple[str, str, list[str], list[list[Any]]]]:
    """Title, note, columns and rows of the phases whose records are lists of plain figures."""
    for maker in (_reference_table, _block_table, _optimisation_tables, _length_table):
        yield from maker(report)


_Table = tuple[str, str, list[str], list[list[Any]]]


def _reference_table(report: RunReport) -> Iterator[_Table]:
    rows = [
        [
            record["payload"].get("check"),
            record["payload"].get("status"),
            "; ".join(
                str(line)
                for key in ("problems", "notes")
                for line in record["payload"].get(key) or []
                if isinstance(line, str)
            ),
        ]
        for record in report.records_of("phase0")
    ]
    if rows:
        yield "Phase 0: reference", "", ["check", "verdict", "remarks"], rows


def _block_table(report: RunReport) -> Iterator[_Table]:
    for record in report.records_of("block"):
        payload = record["payload"]
        limits = payload.get("limits") or {}
        rows = [
            [
                row.get("path"),
                row.get("text"),
                row.get("positions"),
                *(_digits(row.get(key), 6) for key in ("cos_whole", "cos_min", "size")),
                _digits(row.get("max_abs"), 3),
                "OK" if row.get("ok") else "FAIL",
            ]
            for row in dicts(payload.get("rows"))
        ]
        note = (
            f"Limits: cosine {limits.get('whole')}, worst position {limits.get('position')} "
            f"(heads of {payload.get('head_dim')}), size within {limits.get('size')} of 1."
        )
        columns = [
            "path",
            "prompt",
            "positions",
            "cosine",
            "worst position",
            "size ratio",
            "max abs",
            "verdict",
        ]
        yield "Phase 2: block of layer 0", note, columns, rows


def _optimisation_tables(report: RunReport) -> Iterator[_Table]:
    for record in report.records_of("optimisation"):
        payload = record["payload"]
        steps = dicts(payload.get("steps"))
        if not steps:
            continue
        section = str(payload.get("section"))
        base = number((payload.get("baseline_ms") or {}).get(section))
        now = number((payload.get("production_ms") or {}).get(section))
        note = f"{payload.get('clock')}; {payload.get('seq_len')} rows"
        if base and now:
            note += f"; from {base:.2f} ms unfused to {now:.2f} ms, {100 * (1 - now / base):.1f} % less"
        rows = [
            [
                step.get("name"),
                step.get("status"),
                _digits(step.get("before_ms"), 2),
                _digits(step.get("after_ms"), 2),
                _digits(step.get("gain_percent"), 1),
                step.get("equal") or "",
                step.get("reason"),
            ]
            for step in steps
        ]
        columns = ["optimisation", "outcome", "before, ms", "after, ms", "gain, %", "result", "reason"]
        yield f"Phase {payload.get('phase')}: {section}, what each optimisation gains", note, columns, rows


def _length_table(report: RunReport) -> Iterator[_Table]:
    records = report.records_of("limits")
    if not records:
        return
    payload = records[-1]["payload"]
    rows: list[list[Any]] = [
        [
            f"{row.get('length')} tokens",
            f"accepted, compiled length {row.get('limit')}",
            _short(row.get("kl")),
        ]
        for row in dicts(payload.get("lengths"))
    ]
    rows += [
        [f"{row.get('call')} at {row.get('length')}", f"refused: {row.get('error')}", ""]
        for row in dicts(payload.get("refusals"))
    ]
    if rows:
        yield "Length limits", "", ["length", "outcome", "KL to the reference"], rows


def dicts(value: Any) -> list[dict[str, Any]]:
    """The entries of a list that are objects."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _digits(value: Any, places: int) -> str:
    known = number(value)
    return "" if known is None else f"{known:.{places}f}"


def _short(value: Any) -> str:
    known = number(value)
    return "" if known is None else f"{known:.3g}"
