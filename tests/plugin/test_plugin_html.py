"""Columns and banner in the page of pytest-html."""

from __future__ import annotations

import html
import json
import re

import pytest

pytest.importorskip("pytest_html")


def rows(suite) -> dict[str, list[str]]:
    """Cells of each row of the page, by the name of the test."""
    page = (suite.path / "page.html").read_text()
    blob = re.search(r'data-jsonblob="([^"]*)"', page).group(1)
    data = json.loads(html.unescape(blob))
    found = {}
    for nodeid, entries in data["tests"].items():
        cells = [re.sub("<[^>]*>", "", cell) for cell in entries[0]["resultsTableRow"]]
        found[nodeid.split("::")[1]] = cells
    return found


def test_page_has_our_columns(suite):
    suite.model(a="@pytest.mark.phase3\ndef test_gate(npu_device): pass\ndef test_plain(): pass")
    suite.pytester.makepyfile(test_x="def test_foreign(): pass")
    suite.spawn("--html=page.html", "--self-contained-html", plugins="metadata html").assert_outcomes(
        passed=3
    )
    cells = rows(suite)
    assert cells["test_gate"][2:5] == ["phase 3 full model", "tiny", "twin (modelled)"]
    assert cells["test_plain"][2:5] == ["no phase", "tiny", "twin (modelled)"]
    assert cells["test_foreign"][2:5] == ["", "", ""]
    page = (suite.path / "page.html").read_text()
    assert all(f">{column}</th>" in page for column in ("Phase", "Model", "Device"))
    assert "This page is incomplete" not in page


def test_columns_under_xdist(suite):
    suite.model(a="@pytest.mark.phase3\ndef test_gate(npu_device): pass")
    suite.spawn("-n", "1", "--html=page.html", plugins="xdist metadata html").assert_outcomes(passed=1)
    assert rows(suite)["test_gate"][2:5] == ["phase 3 full model", "tiny", "twin (modelled)"]


def test_banner_names_what_the_page_misses(suite):
    suite.model(a="def test_dies(): os._exit(1)\ndef test_good(): pass")
    suite.spawn("-n", "1", "--html=page.html", plugins="xdist metadata html")
    page = (suite.path / "page.html").read_text()
    assert "This page is incomplete." in page
    assert "test_tiny_a.py::test_dies</code>" in page
    assert "test_good</code>" not in page
    assert suite.outcomes() == {"test_dies": "crashed", "test_good": "passed"}


def test_page_without_our_tests_is_untouched(suite):
    suite.pytester.makepyfile(test_x="def test_foreign(): pass")
    suite.spawn("--html=page.html", plugins="metadata html").assert_outcomes(passed=1)
    page = (suite.path / "page.html").read_text()
    assert ">Phase</th>" not in page


GATE = """
def test_gate(npu_record):
    npu_record("topk_gate", {"prompts": [
        {"text": "Why <is> it?", "status": "OK", "divergence_step": 3,
         "npu_token_text": " a", "hf_token_text": " the"},
        {"text": "And then?", "status": "OK", "divergence_step": None}]})
    npu_record("topk_gate", "of no known shape")
"""


@pytest.mark.parametrize(("args", "plugins"), [((), ""), (("-n", "1"), "xdist")], ids=["alone", "xdist"])
def test_gate_table_is_on_the_page(suite, args, plugins):
    suite.model(a=GATE)
    suite.spawn("--html=page.html", *args, plugins=f"metadata html {plugins}").assert_outcomes(passed=1)
    page = (suite.path / "page.html").read_text()
    log = json.loads(html.unescape(re.search(r'data-jsonblob="([^"]*)"', page).group(1)))["tests"]
    (entry,) = next(iter(log.values()))
    assert "<td>Why &lt;is&gt; it?</td><td>OK</td><td>3</td><td> a</td><td> the</td>" in entry["log"]
    assert "<td>And then?</td><td>OK</td><td>none</td><td></td><td></td>" in entry["log"]
