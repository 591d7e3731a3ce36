"""`report.html` and `index.html`: jinja2 templates with autoescape, everything inline."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pytest_npu.core.constants import DEVICE_LABELS, NO_MODEL, TWIN

from . import audit_view, gate_view, view
from .model import RunReport
from .plots import number

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
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["digits"] = _digits
    env.filters["short"] = _short
    env.filters["duration"] = _duration
    return env


def _digits(value: Any, places: int) -> str:
    known = number(value)
    return "–" if known is None else f"{known:.{places}f}"


def _duration(value: Any) -> str:
    known = number(value)
    return "" if known is None else view.duration_text(known)


def _short(value: Any) -> str:
    known = number(value)
    return "–" if known is None else f"{known:.3g}"


def render_report(report: RunReport, run: str) -> str:
    """The page of one run; `run` is the name of its folder."""
    profile = view.profile(report)
    used = {bar.kind for _, bars in (profile.sections if profile else []) for bar in bars}
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            run=run,
            verdict=report.verdict,
            verdict_css=view.VERDICT_CLASS[report.verdict],
            outcome_css=view.OUTCOME_CLASS,
            headline=view.headline(report),
            run_line=view.run_line(report),
            rendered=view.time_text(time.time()),
            plugin_version=_version(),
            modelled=report.device_label.startswith(DEVICE_LABELS[TWIN]),
            figures=view.figures(report),
            phases=view.phase_rows(report),
            problems=view.problems(report),
            session_crashes=[crash for crash in report.crashes if not crash.get("nodeid")],
            gates=view.gates(report),
            diagnoses=view.diagnoses(report),
            heat_maps=view.heat_maps(report),
            profile=profile,
            benchmarks=view.benchmarks(report),
            comparison=view.comparison(report),
            compared=view.COMPARED,
            kernels=view.kernels(report),
            rungs=gate_view.rungs(report),
            divergence=gate_view.divergence_plot(report),
            tables=view.tables(report),
            audits=audit_view.audits(report),
            status_css=audit_view.status_css,
            kinds=[kind for kind in _KINDS if kind[0] in used],
            other_records=view.other_records(report),
            environment=view.environment_rows(report),
            lock_events=[event for event in report.locks if event["action"] != "waiting"],
        )
    )


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
