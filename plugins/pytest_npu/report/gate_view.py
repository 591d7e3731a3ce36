"""Views of what the gates of `llms.verify` record: the ladder's rungs, and tables of phases 0, 2, 4 and 5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .model import RunReport
from .plots import LinePlot, step_plot
from .values import Field, Table, dicts, number, short, table, table_of

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
        _rung(report.phase_of(record), rung)
        for record in report.records_of("ladder")
        for rung in dicts(record["payload"].get("rungs"))
    ]
    return sorted(results, key=lambda rung: 99 if rung.phase is None else rung.phase)


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
        max(judged, key=lambda one: one.share or 0.0, default=None),
        statistics,
        [str(line) for line in entry.get("failures") or []],
    )


def _statistic(entry: Mapping[str, Any], rung: str) -> Statistic:
    value, limit = number(entry.get("value")), number(entry.get("limit"))
    share = None if limit is None else 100.0 * (value / limit if limit and value is not None else 1.0)
    return Statistic(
        str(entry.get("statistic")).removeprefix(f"{rung}.").replace("_", " "),
        short(value, missing="not finite"),
        short(limit, missing=""),
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


def gate_tables(report: RunReport) -> Iterator[Table]:
    """Tables of the phases whose records are lists of plain figures."""
    for maker in (_reference_table, _block_tables, _optimisation_tables, _length_table):
        yield from (one for one in maker(report) if one.rows)


def _reference_table(report: RunReport) -> Iterator[Table]:
    payloads = [record["payload"] for record in report.records_of("phase0")]
    columns: dict[str, Field] = {"check": "check", "verdict": "status", "remarks": _remarks}
    yield table_of("Phase 0: reference", "", payloads, columns)


def _remarks(payload: Mapping[str, Any]) -> str:
    lines = [line for key in ("problems", "notes") for line in payload.get(key) or []]
    return "; ".join(line for line in lines if isinstance(line, str))


def _block_tables(report: RunReport) -> Iterator[Table]:
    for record in report.records_of("block"):
        payload = record["payload"]
        limits = payload.get("limits") or {}
        note = (
            f"Limits: cosine {limits.get('whole')}, worst position {limits.get('position')} "
            f"(heads of {payload.get('head_dim')}), size within {limits.get('size')} of 1."
        )
        columns: dict[str, Field] = {
            "path": "path",
            "prompt": "text",
            "positions": "positions",
            "cosine": ("cos_whole", 6),
            "worst position": ("cos_min", 6),
            "size ratio": ("size", 6),
            "max abs": ("max_abs", 3),
            "verdict": lambda row: "OK" if row.get("ok") else "FAIL",
        }
        yield table_of("Phase 2: block of layer 0", note, dicts(payload.get("rows")), columns)


def _optimisation_tables(report: RunReport) -> Iterator[Table]:
    for record in report.records_of("optimisation"):
        payload = record["payload"]
        section = str(payload.get("section"))
        base = number((payload.get("baseline_ms") or {}).get(section))
        now = number((payload.get("production_ms") or {}).get(section))
        note = f"{payload.get('clock')}; {payload.get('seq_len')} rows"
        if base and now:
            note += f"; from {base:.2f} ms unfused to {now:.2f} ms, {100 * (1 - now / base):.1f} % less"
        columns: dict[str, Field] = {
            "optimisation": "name",
            "outcome": "status",
            "before, ms": ("before_ms", 2),
            "after, ms": ("after_ms", 2),
            "gain, %": ("gain_percent", 1),
            "result": "equal",
            "reason": "reason",
        }
        title = f"Phase {payload.get('phase')}: {section}, what each optimisation gains"
        yield table_of(title, note, dicts(payload.get("steps")), columns)


def _length_table(report: RunReport) -> Iterator[Table]:
    for record in report.records_of("limits")[-1:]:
        payload = record["payload"]
        accepted = [
            (
                f"{row.get('length')} tokens",
                f"accepted, compiled length {row.get('limit')}",
                short(row.get("kl"), ""),
            )
            for row in dicts(payload.get("lengths"))
        ]
        refused = [
            (f"{row.get('call')} at {row.get('length')}", f"refused: {row.get('error')}", "")
            for row in dicts(payload.get("refusals"))
        ]
        yield table("Length limits", "", ("length", "outcome", "KL to the reference"), accepted + refused)
