"""`report.html`, `evaluation_report.md` and `index.html`: jinja2 templates over one view of a run."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pytest_npu.core.constants import DEVICE_LABELS, NO_MODEL, TWIN

from . import audit_view, gate_view, view
from .model import RunReport
from .values import digits, number, short

if TYPE_CHECKING:
    from jinja2 import Environment

    from .index import ModelRuns

_KINDS = (
    ("elf", "ELF run"),
    ("kernel", "kernel inside an ELF"),
    ("host", "host operation"),
    ("bo_write", "buffer write"),
    ("bo_read", "buffer read"),
)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader

    env = Environment(
        loader=PackageLoader("pytest_npu.report", "templates"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(
        digits=digits,
        short=short,
        duration=_duration,
        cell=_cell,
        row=_row,
        block=_block,
        test_name=_test_name,
    )
    return env


def _duration(value: Any) -> str:
    seconds = number(value)
    return "" if seconds is None else view.duration_text(seconds)


def _cell(value: Any) -> str:
    """Markdown that keeps its table cell: no pipes, no line breaks, no markup."""
    text = str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ↵ ").replace("<", "&lt;")
    return text.replace("`", "'")


def _row(values: Iterable[Any]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(_cell, values))} |"


def _block(text: Any) -> str:
    """A fenced block of Markdown, its fence longer than any in the text."""
    plain, fence = str(text), "```"
    while fence in plain:
        fence += "`"
    return f"{fence}\n{plain.rstrip()}\n{fence}"


def _test_name(nodeid: str) -> str:
    """The name of a test in its node id."""
    return nodeid.rpartition("::")[2]


def render_report(report: RunReport, run: str) -> str:
    """The page of one run; `run` is the name of its folder."""
    return _environment().get_template("report.html.j2").render(_facts(report, run))


def render_markdown(report: RunReport, run: str) -> str:
    """The same as text, for reviews and repositories."""
    return _environment().get_template("evaluation_report.md.j2").render(_facts(report, run)) + "\n"


def _facts(report: RunReport, run: str) -> dict[str, Any]:
    """What the templates of one run show."""
    profile = view.profile(report)
    used = {bar.kind for _, bars in (profile.sections if profile else []) for bar in bars}
    return {
        "report": report,
        "run": run,
        "verdict": report.verdict,
        "verdict_css": view.VERDICT_CLASS[report.verdict],
        "outcome_css": view.OUTCOME_CLASS,
        "headline": view.headline(report),
        "run_line": view.run_line(report),
        "started": view.time_text(report.started_at),
        "command": view.command(report),
        "rendered": view.time_text(time.time()),
        "plugin_version": _version(),
        "modelled": report.device_label.startswith(DEVICE_LABELS[TWIN]),
        "figures": view.figures(report),
        "phases": view.phase_rows(report),
        "problems": view.problems(report),
        "session_crashes": [crash for crash in report.crashes if not crash.get("nodeid")],
        "gates": view.gates(report),
        "diagnoses": view.diagnoses(report),
        "heat_maps": view.heat_maps(report),
        "profile": profile,
        "benchmarks": view.benchmarks(report),
        "comparison": view.comparison(report),
        "kernels": view.kernels(report),
        "rungs": gate_view.rungs(report),
        "divergence": gate_view.divergence_plot(report),
        "tables": view.tables(report),
        "audits": audit_view.audits(report),
        "status_css": audit_view.status_css,
        "kinds": [kind for kind in _KINDS if kind[0] in used],
        "other_records": view.other_records(report),
        "environment": view.environment_rows(report),
        "lock_events": [event for event in report.locks if event["action"] != "waiting"],
    }


def render_index(models: Sequence[ModelRuns]) -> str:
    """The page of all models."""
    return (
        _environment()
        .get_template("index.html.j2")
        .render(
            models=models,
            model_count=sum(model.name != NO_MODEL for model in models),
            run_count=sum(len(model.runs) + model.older for model in models),
            rendered=view.time_text(time.time()),
        )
    )


def _version() -> str:
    """Version of the plugin; it may run from a source tree that is not installed."""
    try:
        return importlib.metadata.version("pytest-npu")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
