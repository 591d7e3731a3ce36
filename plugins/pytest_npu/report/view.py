"""From results to what the templates show: texts, colours, order. Pure functions of a RunReport."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_npu.core.constants import PHASES

from .gate_view import cache_limits, gate_tables
from .model import BAD, OPEN, RECORD_LISTS, RunReport, TestResult
from .plots import Bar, HeatMap, breakdown_bars, cache_heat_maps, cosine_plot
from .timing import Timing, timing_of
from .values import Field, Table, number, table, table_of

VERDICT_CLASS = {
    "PASS": "good",
    "FAIL": "bad",
    "INCOMPLETE": "warn",
    "EMPTY": "warn",
    "BLOCKED": "muted",
    "not run": "muted",
}
OUTCOME_CLASS = {
    **dict.fromkeys(BAD, "bad"),
    **dict.fromkeys(OPEN, "warn"),
    "passed": "good",
    "xfailed": "good",
    "xpassed": "warn",
    "blocked": "muted",
    "skipped": "muted",
}


@dataclass(frozen=True)
class Figure:
    """A key figure at the top of the report."""

    label: str
    value: str
    note: str = ""
    css: str = ""
    unit: str = ""


@dataclass(frozen=True)
class PhaseRow:
    """One phase in the table and in the strip above it."""

    number: str
    title: str
    verdict: str
    css: str
    tests: str
    duration: str
    lock_wait: str


def duration_text(seconds: float) -> str:
    """`0.42 s`, `12.3 s`, `3 min 05 s`, `1 h 02 min`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def time_text(epoch: float) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch)) if epoch else ""


def visible(text: Any) -> str:
    """Token text with its white space made visible at the ends and at line breaks."""
    if text is None:
        return "none"
    string = str(text)
    if not string:
        return "∅"
    lead = len(string) - len(string.lstrip(" "))
    trail = len(string) - len(string.rstrip(" ")) if lead < len(string) else 0
    core = string[lead : len(string) - trail]
    return ("␣" * lead + core + "␣" * trail).replace("\n", "↵").replace("\t", "⇥")


def headline(report: RunReport) -> str:
    """One sentence under the verdict."""
    if report.poisoned:
        return f"The device went out of use: {report.poisoned}."
    if report.verdict == "PASS":
        return "Every selected test passed."
    if report.verdict == "EMPTY":
        return "No test ran, so nothing was verified."
    if report.verdict == "INCOMPLETE":
        why = report.interrupts[-1] if report.interrupts else "the run ended without finishing"
        return f"Not every selected test ran to its end: {why}."
    worst = next((t for t in report.tests.values() if t.outcome in BAD), None)
    if worst is None and report.regressions:
        first = report.regressions[0]
        return f"Performance: {first['nodeid'].rpartition('::')[2]} {first['reason']}."
    if worst is None:
        return (
            "Some tests could not be collected." if report.collect_errors else "Blocked by an earlier phase."
        )
    return f"First problem: {worst.name}: {worst.reason}" if worst.reason else f"First problem: {worst.name}"


def command(report: RunReport) -> str:
    """The command line that makes this run again."""
    session = report.session
    return str(session.get("command") or " ".join(["pytest", *map(str, session.get("argv") or [])]))


def figures(report: RunReport) -> list[Figure]:
    """Key figures in the order a reader asks for them."""
    figures = []
    total = sum(report.counts.values())
    passed = report.counts.get("passed", 0)
    figures.append(Figure("tests passed", f"{passed} of {total}", report.counts_text))
    gates = report.records_of("topk_gate")
    if gates:
        prompts = [prompt for gate in gates for prompt in gate["payload"].get("prompts", [])]
        good = sum(prompt.get("status") == "OK" for prompt in prompts)
        exact = sum(prompt.get("divergence_step") is None for prompt in prompts)
        css = "good" if prompts and good == len(prompts) else "bad"
        figures.append(
            Figure("token-set gate", f"{good} of {len(prompts)}", f"{exact} identical to the end", css)
        )
    timing = timing_of(report)
    if timing is not None:
        for label, value, unit in (
            ("time to first token", timing.ttft_ms, "ms"),
            ("time per output token", timing.tpot_ms, "ms"),
            ("decode rate", timing.tps, "tokens/s"),
        ):
            if value is not None:
                figures.append(Figure(label, f"{value:.1f}", timing.clock, unit=unit))
    cosines = [
        (cosine, row)
        for record in report.records_of("diagnosis")
        for row in record["payload"].get("rows", [])
        if (cosine := number(row.get("cos_min"))) is not None
    ]
    if cosines:
        value, row = min(cosines, key=lambda pair: pair[0])
        figures.append(
            Figure(
                "lowest cosine",
                f"{value:.4f}",
                f"{row.get('path')}, layer {row.get('layer')}; for information",
            )
        )
    return figures


def run_line(report: RunReport) -> str:
    """When the run started and how long it took."""
    text = f"{time_text(report.started_at)} · {duration_text(report.ended_at - report.started_at)}"
    wait = report.lock_wait_s
    return f"{text}, {duration_text(wait)} of it waiting for the NPU" if wait else text


def phase_rows(report: RunReport) -> list[PhaseRow]:
    """All phases, also those without tests in this run."""
    have = {phase.phase: phase for phase in report.phases}
    keys: list[int | None] = [*PHASES, None] if None in have else [*PHASES]
    rows = []
    for key in keys:
        phase = have.get(key)
        title = PHASES[key] if key is not None else "tests without a phase"
        label = "–" if key is None else str(key)
        if phase is None:
            rows.append(PhaseRow(label, title, "not run", "muted", "", "", ""))
            continue
        wait = duration_text(phase.lock_wait_s) if phase.lock_wait_s else ""
        css = VERDICT_CLASS[phase.verdict]
        rows.append(
            PhaseRow(
                label, title, phase.verdict, css, phase.counts_text, duration_text(phase.duration_s), wait
            )
        )
    return rows


def gates(report: RunReport) -> list[dict[str, Any]]:
    """Token-set gates: their records, with `source` and with the texts of the table in each prompt."""
    return [
        {
            **record["payload"],
            "source": source_of(report, record),
            "prompts": [_prompt_view(prompt) for prompt in record["payload"].get("prompts", [])],
        }
        for record in report.records_of("topk_gate")
    ]


def source_of(report: RunReport, record: Mapping[str, Any]) -> str:
    """`phase 3, test_topk_gate`: the test that made a record."""
    phase, name = report.phase_of(record), str(record.get("nodeid") or "").rpartition("::")[2]
    return name if phase is None else f"phase {phase}, {name}"


def _prompt_view(prompt: Mapping[str, Any]) -> dict[str, Any]:
    agreed = str(prompt.get("agreed_prefix") or "")
    diverged = prompt.get("divergence_step") is not None
    view = {
        **prompt,
        "diverged": diverged,
        "css": "good" if prompt.get("status") == "OK" else "bad",
        "step_text": str(prompt["divergence_step"]) if diverged else "identical",
    }
    for side, other in (("npu", "hf"), ("hf", "npu")):
        rank = prompt.get(f"{side}_rank_in_{other}")
        view[f"{side}_shown"] = visible(prompt.get(f"{side}_token_text")) if diverged else ""
        view[f"{side}_rank"] = (
            f"rank {rank}" if rank is not None else f"not in top {len(prompt.get('hf_topk') or [])}"
        )
        text = str(prompt.get(f"{side}_text") or "")
        shared = agreed if agreed and text.startswith(agreed) else ""
        view[f"{side}_agreed"], view[f"{side}_rest"] = shared, text[len(shared) :]
    return view


def diagnoses(report: RunReport) -> list[dict[str, Any]]:
    """Per-layer comparisons: their records, with `source` and `plot`."""
    return [
        {
            **record["payload"],
            "source": source_of(report, record),
            "plot": cosine_plot(record["payload"].get("rows", [])),
        }
        for record in report.records_of("diagnosis")
    ]


def heat_maps(report: RunReport) -> list[HeatMap]:
    """The last KV cache check of the run; an earlier phase judged other programs of the same model."""
    records = report.records_of("cache_check")
    if not records:
        return []
    limits = cache_limits(report, records[-1].get("nodeid"))
    return cache_heat_maps(records[-1]["payload"], limits)


@dataclass(frozen=True)
class Profile:
    """Where the time goes, by section (prefill, decode)."""

    timing: Timing
    sections: list[tuple[str, list[Bar]]]


def profile(report: RunReport) -> Profile | None:
    """TTFT, TPOT and their breakdown charts; None when nothing was timed."""
    timing = timing_of(report)
    if timing is None:
        return None
    names = sorted(
        {str(row.get("section")) for row in timing.rows}, key=lambda name: (name != "prefill", name)
    )
    sections = []
    for name in names:
        rows = [row for row in timing.rows if str(row.get("section")) == name]
        kernels = [row for row in rows if row.get("kind") == "kernel"]
        others = [row for row in rows if row.get("kind") != "kernel"]
        # The time of a kernel is part of its ELF's: shown apart, as a share of the same whole.
        whole = sum(number(row.get("total_ms")) or 0.0 for row in others or kernels)
        sections.append((name, breakdown_bars(others, whole)))
        sections.append((f"{name}: kernels inside the ELFs", breakdown_bars(kernels, whole)))
    sections = [(title, bars) for title, bars in sections if bars]
    return Profile(timing, sections)


def benchmarks(report: RunReport) -> list[dict[str, Any]]:
    """Measurements on the device clock, times in ms."""
    measurements = []
    for record in report.records_of("benchmark"):
        payload = record["payload"]
        times = {key: number(payload.get(key)) for key in ("min", "median", "mean", "max", "stddev")}
        milliseconds = {key: "–" if value is None else f"{value * 1e3:.3f}" for key, value in times.items()}
        measurements.append({**payload, **milliseconds})
    return measurements


def comparison(report: RunReport) -> Table | None:
    """This run beside predictions and published silicon; times in ms.

    The last record of kind `comparison`, with the figures of this run above it.
    """
    records = report.records_of("comparison")
    if not records:
        return None
    payload, timing = records[-1]["payload"], timing_of(report)
    rows = [] if timing is None else [_this_run(report, timing)]
    columns: dict[str, Field] = {
        "model": "what",
        "device": "device",
        "checkpoint": "checkpoint",
        "prompt": "seq_len",
        "TTFT, ms": ("ttft_ms", 1),
        "per token, ms": ("tpot_ms", 1),
        "tokens/s": _rate,
        "source": "source",
    }
    definition = str(payload.get("definition") or "")
    return table_of("Beside published silicon", definition, rows + payload["rows"], columns)


def _this_run(report: RunReport, timing: Timing) -> dict[str, Any]:
    return {
        "what": f"{report.model}, this run",
        "device": timing.clock,
        "checkpoint": report.checkpoint_label,
        "seq_len": timing.seq_len,
        "ttft_ms": timing.ttft_ms,
        "tpot_ms": timing.tpot_ms,
        "source": "median of its benchmarks",
    }


def _rate(row: Mapping[str, Any]) -> str:
    tpot = number(row.get("tpot_ms"))
    return f"{1e3 / tpot:.1f}" if tpot else ""


@dataclass(frozen=True)
class KernelRow:
    """One kernel at one shape: how far it is from its fp32 reference, beside what is allowed."""

    name: str
    method: str
    cores: str
    error: str
    limit: str
    over: str
    provenance: str
    status: str
    css: str


def kernels(report: RunReport) -> list[KernelRow]:
    """Kernels that were judged alone: those that failed first, then those in tier, then the others."""
    rows = []
    for kernel in report.kernels:
        payload = kernel.payload
        baseline = payload["baseline"] if isinstance(payload.get("baseline"), dict) else {}
        limit, error = number(baseline.get("limit")), number(payload.get("mean_rel_L1"))
        css = "bad" if kernel.status == "FAIL" else "warn" if kernel.in_tier else "good"
        rows.append(
            KernelRow(
                str(payload.get("kernel")),
                str(payload.get("method") or ""),
                str(payload.get("cores") or ""),
                "" if error is None else f"{error:.2e}",
                "" if limit is None else f"{limit:.2e}",
                kernel.elements_text,
                str(payload.get("provenance") or "no row"),
                "in tier" if kernel.in_tier else kernel.status,
                css,
            )
        )
    return sorted(rows, key=lambda row: ("bad", "warn", "good").index(row.css))


def tables(report: RunReport) -> list[Table]:
    """Gates with plain figures, then records of kind `table`: `title`, `note`, `columns` and `rows`."""
    recorded = [
        table(
            str(payload.get("title") or record.get("nodeid") or ""),
            str(payload.get("note") or ""),
            payload.get("columns") or [],
            payload.get("rows") or [],
        )
        for record in report.records_of("table")
        for payload in [record["payload"]]
    ]
    return [*gate_tables(report), *recorded]


def problems(report: RunReport) -> list[TestResult]:
    """Tests that failed, crashed or did not end, worst first."""
    order = (*BAD, *OPEN)
    tests = [test for test in report.tests.values() if test.outcome in order]
    return sorted(tests, key=lambda test: order.index(test.outcome))


def other_records(report: RunReport) -> list[tuple[str, str, str]]:
    """Records without a section of their own: kind, node id, indented JSON."""
    return [
        (
            record["kind"],
            record.get("nodeid") or "",
            json.dumps(record["payload"], indent=1, ensure_ascii=False),
        )
        for record in report.records
        if record["kind"] not in RECORD_LISTS
    ]


def environment_rows(report: RunReport) -> list[tuple[str, str]]:
    """Name and value of everything worth knowing about machine, software and selection."""
    session, deployment = report.session, report.deployment
    checkpoint = deployment.get("checkpoint") or {}
    hosts = (f"{worker} on {host}" for worker, host in sorted(report.workers.items()))
    options = {k: v for k, v in (session.get("options") or {}).items() if v is not None}
    rows = [
        ("device", report.device_label),
        ("checkpoint", report.checkpoint_label),
        ("checkpoint source", checkpoint.get("kind")),
        ("checkpoint hash", checkpoint.get("content_hash")),
        ("variant", deployment.get("variant")),
        ("host", session.get("host")),
        ("workers", ", ".join(hosts)),
        ("platform", session.get("platform")),
        ("CPU", session.get("cpu")),
        ("Python", session.get("python")),
        ("packages", _pairs(session.get("versions"))),
        ("command", command(report)),
        ("options", _pairs(options)),
        ("model config", _pairs(deployment.get("config"))),
        ("exit status", "" if report.exit_status is None else str(report.exit_status)),
    ]
    return [(name, str(value)) for name, value in rows if value]


def _pairs(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items())
