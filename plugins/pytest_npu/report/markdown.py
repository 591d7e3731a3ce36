"""`evaluation_report.md`: the same results as text, for reviews and repositories."""

from __future__ import annotations

from typing import Any

from . import audit_view, view
from .model import RunReport
from .plots import number
from .timing import timing_of


def _cell(value: Any) -> str:
    """Text that keeps its table cell: no pipes, no line breaks, no markup."""
    text = str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ↵ ").replace("<", "&lt;")
    return text.replace("`", "'")


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return [*lines, ""]


def _block(text: str) -> list[str]:
    fence = "```"
    while fence in text:
        fence += "`"
    return [fence, text.rstrip(), fence, ""]


def _figure(value: Any, places: int) -> str:
    known = number(value)
    return "–" if known is None else f"{known:.{places}f}"


def render_markdown(report: RunReport, run: str) -> str:
    """The evaluation report of one run."""
    lines = [f"# {report.model}: {report.verdict}", "", view.headline(report), ""]
    lines += _table(
        ("", ""),
        [
            ("run", run),
            ("device", report.device_label),
            ("checkpoint", report.checkpoint_label),
            ("started", view.time_text(report.started_at)),
            ("tests", view.count_text(report.counts)),
            ("duration", view.duration_text(report.ended_at - report.started_at)),
            ("waiting for the NPU", view.duration_text(report.lock_wait_s)),
        ],
    )
    lines += ["## Phases", ""]
    lines += _table(
        ("phase", "verdict", "tests", "time"),
        [(f"{r.number} {r.title}", r.verdict, r.tests, r.duration) for r in view.phase_rows(report)],
    )
    lines += (
        _problem_lines(report)
        + _kernel_lines(report)
        + _gate_lines(report)
        + _diagnosis_lines(report)
        + _time_lines(report)
        + _audit_lines(report)
    )
    for table in view.tables(report):
        lines += [f"## {_cell(table.title)}", "", table.note, ""]
        lines += _table(tuple(table.columns), [tuple(row) for row in table.rows])
    lines += ["## Environment", ""]
    lines += _table(("", ""), list(view.environment_rows(report)))
    lines += ["## Do it again", ""]
    lines += _block(view.command(report))
    return "\n".join(lines)


def _problem_lines(report: RunReport) -> list[str]:
    problems = view.problems(report)
    if not problems and not report.collect_errors and not report.crashes and not report.regressions:
        return []
    lines = ["## Failures", ""]
    for entry in report.regressions:
        lines += [f"### {_cell(entry['nodeid'].rpartition('::')[2])}: {_cell(entry['reason'])}", ""]
    for error in report.collect_errors:
        lines += [f"### {error['nodeid']} could not be collected", "", *_block(str(error["longrepr"]))]
    for crash in report.crashes:
        if not crash.get("nodeid"):
            lines += [f"### {crash['cause']}", "", *_block(str(crash.get("detail") or ""))]
    for test in problems:
        lines += [f"### {test.outcome}: {_cell(test.name)}", "", _cell(test.reason), ""]
        for title, text in test.details:
            lines += [f"{title}:", "", *_block(text)]
    return lines


def _gate_lines(report: RunReport) -> list[str]:
    lines = []
    for gate in view.gates(report):
        lines += ["## Token-set gate", "", f"{gate.n_tokens} tokens, k = {gate.k}, {_cell(gate.source)}", ""]
        rows = []
        for prompt in gate.prompts:
            npu = f"{prompt['npu_shown']} ({prompt['npu_rank']})" if prompt["diverged"] else ""
            hf = f"{prompt['hf_shown']} ({prompt['hf_rank']})" if prompt["diverged"] else ""
            rows.append(
                (
                    prompt.get("index"),
                    prompt.get("text"),
                    prompt.get("status"),
                    prompt.get("n_steps"),
                    prompt["step_text"],
                    npu,
                    hf,
                    prompt.get("reason") or "",
                )
            )
        head = (
            "#",
            "prompt",
            "verdict",
            "steps",
            "first difference",
            "NPU token",
            "reference token",
            "reason",
        )
        lines += _table(head, rows)
    return lines


def _audit_lines(report: RunReport) -> list[str]:
    lines = []
    for audit in audit_view.audits(report):
        lines += [f"## Independent audit: {audit.verdict}", "", audit.meaning, ""]
        for table in audit.tables:
            lines += [f"### {table.title}", ""] if table.title else []
            lines += _table(table.columns, list(table.rows))
        if audit.not_shown:
            lines += ["### What this does not show", "", *(f"- {text}" for text in audit.not_shown), ""]
        lines += ["### Reproduce", "", *_block("\n".join(audit.commands)), audit.environment, ""]
    return lines


def _kernel_lines(report: RunReport) -> list[str]:
    rows = [
        (row.name, row.method, row.cores, row.error, row.limit, row.over, row.provenance, row.status)
        for row in view.kernels(report)
    ]
    head = ("kernel", "method", "cores", "mean rel. L1", "limit", "elements over", "registry row", "verdict")
    return ["## Kernels", "", *_table(head, rows)] if rows else []


def _diagnosis_lines(report: RunReport) -> list[str]:
    lines = []
    for diagnosis in view.diagnoses(report):
        lines += ["## Layer by layer", "", f"Prompt: {_cell(diagnosis.prompt)}", ""]
        rows = [
            (
                row.get("path"),
                row.get("layer"),
                row.get("probe"),
                *(_figure(row.get(key), 6) for key in ("cos_min", "cos_p5", "cos_median")),
                _figure(row.get("max_abs"), 4),
            )
            for row in diagnosis.rows
        ]
        lines += _table(("path", "layer", "probe", "cos min", "cos p5", "cos median", "max abs"), rows)
    return lines


def _time_lines(report: RunReport) -> list[str]:
    lines = []
    timing = timing_of(report)
    if timing is not None:
        lines += [f"## Times, {timing.clock}", ""]
        figures = (_figure(timing.ttft_ms, 2), _figure(timing.tpot_ms, 2), _figure(timing.tps, 2))
        lines += ["TTFT {} ms, TPOT {} ms, {} tokens/s".format(*figures), ""]
        rows = [
            (
                row.get("section"),
                row.get("kind"),
                row.get("name"),
                row.get("calls"),
                _figure(row.get("total_ms"), 3),
                _figure(row.get("per_call_ms"), 4),
            )
            for row in timing.rows
        ]
        lines += (
            _table(("section", "kind", "name", "calls", "ms in all", "ms per call"), rows) if rows else []
        )
    comparison = view.comparison(report)
    if comparison is not None:
        lines += ["## Beside published silicon", "", comparison.definition, ""]
        lines += _table(view.COMPARED, [tuple(row) for row in comparison.rows])
    benchmarks = view.benchmarks(report)
    if benchmarks:
        lines += ["## Benchmarks, ms on the device clock", ""]
        measured = [
            (b["name"], b["median"], b["min"], b["max"], b["rounds"], b.get("device")) for b in benchmarks
        ]
        lines += _table(("test", "median", "min", "max", "rounds", "device"), measured)
    return lines
