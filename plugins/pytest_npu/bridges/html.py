"""pytest-html: columns for phase, model and device, and a banner when the page misses tests."""

from __future__ import annotations

from html import escape
from typing import Any

import pytest

from pytest_npu.core.constants import REPORT_FIELD
from pytest_npu.core.events import Event
from pytest_npu.core.phases import phase_label
from pytest_npu.core.state import NpuState
from pytest_npu.report.values import Field, Table, dicts, number, table, table_of

_COLUMNS = ("Phase", "Model", "Device")


class HtmlHooks:
    """Hooks of pytest-html; registered only when it is installed and writes a page."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self._started: set[str] = set()
        #: Kind and payload of what tests recorded, by node id.
        self._records: dict[str, list[tuple[str, Any]]] = {}

    def pytest_npu_event(self, event: Event) -> None:
        """Keep what the page shows of a test; `pytest_npu_event`."""
        if event["event"] == "test_start":
            self._started.add(event["nodeid"])
        elif event["event"] == "record":
            self._records.setdefault(event["nodeid"], []).append((event["kind"], event["payload"]))

    def pytest_html_results_table_header(self, cells: list[str]) -> None:
        """Add our column heads; `pytest_html_results_table_header`."""
        cells[2:2] = [f'<th class="sortable" data-column-type="{c.lower()}">{c}</th>' for c in _COLUMNS]

    def pytest_html_results_table_row(self, report: pytest.TestReport, cells: list[str]) -> None:
        """Add our cells; `pytest_html_results_table_row`. Rows of other tests get empty cells."""
        self._shown.add(report.nodeid)
        extra: dict[str, Any] = getattr(report, REPORT_FIELD, {})
        phase = phase_label(extra["phase"]) if extra else ""
        values = (phase, extra.get("model", ""), extra.get("device", ""))
        cells[2:2] = [
            f'<td class="col-{name.lower()}">{escape(str(value))}</td>'
            for name, value in zip(_COLUMNS, values, strict=True)
        ]

    def pytest_html_results_table_html(self, report: pytest.TestReport, data: list[str]) -> None:
        """Show what the test recorded; `pytest_html_results_table_html`."""
        if report.when == "call":
            data[:0] = [
                table for record in self._records.pop(report.nodeid, []) for table in gate_table(*record)
            ]

    def pytest_html_results_summary(self, prefix: list[str], session: pytest.Session) -> None:
        """Name tests that ran but are missing on the page; `pytest_html_results_summary`."""
        missing = [nodeid for nodeid in sorted(self._started) if nodeid not in self._shown]
        if not missing:
            return
        items = "".join(f"<li><code>{escape(nodeid)}</code></li>" for nodeid in missing)
        prefix.append(
            '<div style="border:2px solid #b00020;border-radius:4px;padding:8px 12px;margin:8px 0">'
            f"<strong>This page is incomplete.</strong> {len(missing)} test(s) were started but have no row "
            "here, because they crashed, hung or were interrupted. The report of the run "
            f"(see the npu summary in the terminal) has them:<ul>{items}</ul></div>"
        )


def gate_table(kind: str, payload: Any) -> list[str]:
    """A recorded result as an HTML table; nothing for kinds without one, or of another shape."""
    shown = _table(kind, payload) if isinstance(payload, dict) else None
    if shown is None or not shown.rows:
        return []
    cells = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in shown.columns) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in shown.rows]
    return [f'<table class="npu-{kind}" style="white-space:normal;margin:4px 0">{"".join(cells)}</table>']


def _table(kind: str, payload: dict[str, Any]) -> Table | None:
    columns: dict[str, Field]
    if kind == "topk_gate":
        columns = {
            "prompt": "text",
            "verdict": "status",
            "first difference": lambda row: (
                "none" if row.get("divergence_step") is None else row["divergence_step"]
            ),
            "NPU token": "npu_token_text",
            "reference token": "hf_token_text",
        }
        return table_of("", "", dicts(payload.get("prompts")), columns)
    if kind == "benchmark":
        median = number(payload.get("median"))
        milliseconds = {**payload, "median": None if median is None else 1e3 * median}
        columns = {"benchmark": "name", "median, ms": ("median", 3), "rounds": "rounds", "device": "device"}
        return table_of("", "", [milliseconds], columns)
    if kind == "table":
        return table("", "", payload.get("columns") or [], payload.get("rows") or [])
    return None


def register(state: NpuState) -> None:
    """Register the hooks when a pytest-html page is to be written."""
    if hasattr(state.config.hook, "pytest_html_results_summary"):
        state.config.pluginmanager.register(HtmlHooks(), "npu-html")
