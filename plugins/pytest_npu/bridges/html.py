"""pytest-html: columns for phase, model and device, and a banner when the page misses tests."""

from __future__ import annotations

from html import escape
from typing import Any

import pytest

from pytest_npu.core.constants import REPORT_FIELD
from pytest_npu.core.events import Event
from pytest_npu.core.phases import phase_label
from pytest_npu.core.state import NpuState

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
    rows: list[tuple[Any, ...]] = []
    if not isinstance(payload, dict):
        return []
    if kind == "topk_gate":
        rows.append(("prompt", "verdict", "first difference", "NPU token", "reference token"))
        for prompt in payload.get("prompts") or []:
            if not isinstance(prompt, dict):
                return []
            step = prompt.get("divergence_step")
            tokens = ("", "") if step is None else (prompt.get("npu_token_text"), prompt.get("hf_token_text"))
            rows.append((prompt.get("text"), prompt.get("status"), "none" if step is None else step, *tokens))
    elif kind == "benchmark":
        rows.append(("benchmark", "median, ms", "rounds", "device"))
        median = payload.get("median")
        shown = f"{median * 1e3:.3f}" if isinstance(median, float) else median
        rows.append((payload.get("name"), shown, payload.get("rounds"), payload.get("device")))
    elif kind == "table":
        rows = [tuple(payload.get("columns") or []), *(tuple(row) for row in payload.get("rows") or [])]
    if len(rows) < 2:
        return []
    head, *body = rows
    cells = ["<tr>" + "".join(f"<th>{escape(str(cell))}</th>" for cell in head) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in body]
    return [f'<table class="npu-{kind}" style="white-space:normal;margin:4px 0">{"".join(cells)}</table>']


def register(state: NpuState) -> None:
    """Register the hooks when a pytest-html page is to be written."""
    if hasattr(state.config.hook, "pytest_html_results_summary"):
        state.config.pluginmanager.register(HtmlHooks(), "npu-html")
