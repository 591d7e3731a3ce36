"""The structure of what other programs read is pinned: a change of it shows in a diff of the snapshot."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import sample_log
from pytest_npu.report import build_run_report
from pytest_npu.report.junit import render_junit
from pytest_npu.report.render import render_markdown, render_report
from pytest_npu.report.results import results_of


def structure(value: Any) -> Any:
    """Names and types; of a list the union of its entries' structures."""
    if isinstance(value, dict):
        return {key: structure(value[key]) for key in value}
    if isinstance(value, list):
        merged: dict[str, Any] = {}
        for entry in value:
            kind = structure(entry)
            merged = {**merged, **kind} if isinstance(kind, dict) else {"entry": kind}
        return [merged]
    return type(value).__name__


def test_results_json(snapshot):
    results = results_of(build_run_report("m", sample_log.events()), "run")
    results["records"] = [{**record, "payload": {}} for record in results["records"]]
    assert structure(results) == snapshot


def test_headings_of_the_page(snapshot):
    page = render_report(build_run_report("m", sample_log.events()), "run")
    found = re.findall(r'<section id="(\w+)">\s*<h2>([^<]*)</h2>', page)
    assert found == snapshot


def test_headings_of_the_evaluation_report(snapshot):
    text = render_markdown(build_run_report("m", sample_log.events()), "run")
    assert [line for line in text.splitlines() if line.startswith("#")] == snapshot


def test_cases_of_junit(snapshot):
    text = render_junit(build_run_report("m", sample_log.events()))
    assert re.findall(r"<(testsuite|testcase|failure|error|skipped) ([^>]*?)/?>", text) == snapshot
