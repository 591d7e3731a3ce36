"""The gates' own records in the report: rungs beside their limits, heat maps, plots and tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sample_log
from pytest_npu.report import build_run_report, gate_view, plots, view
from pytest_npu.report.render import render_report


@pytest.fixture
def report():
    return build_run_report("smollm2_135m", sample_log.events())


def test_rungs_show_the_figure_that_is_closest_to_its_limit(report):
    cache, consistency, determinism = gate_view.rungs(report)
    assert (cache.phase, cache.title, cache.status, cache.css) == (6, "KV cache", "failed", "bad")
    assert cache.closest is not None
    assert (cache.closest.name, cache.closest.value, cache.closest.limit) == ("key cosine", "0.0121", "0.01")
    assert cache.closest.share == pytest.approx(121.0)
    assert [one.css for one in cache.statistics] == ["bad", "good", "good"]
    assert (consistency.status, consistency.css, consistency.closest) == ("not offered", "muted", None)
    assert determinism.css == "good"


def test_a_figure_that_is_not_finite_uses_all_of_its_limit():
    measured = [{"statistic": "x.kl", "limit": 0.1, "value": None}]
    payload = {"rungs": [{"name": "x", "status": "failed", "measured": measured}]}
    event = {"event": "record", "nodeid": "a", "kind": "ladder", "payload": payload}
    (rung,) = gate_view.rungs(build_run_report("m", [event]))
    assert rung.closest is not None
    assert (rung.closest.value, rung.closest.share) == ("not finite", 100.0)


def test_heat_map_shows_the_worst_prompt_and_what_is_beyond_the_limit(report):
    keys, values = view.heat_maps(report)
    assert len(keys.cells) == len(values.cells) == 30 * 3
    worst = sample_log.cache_payload()["prompts"][0]["key_min_cosine"]
    places = [(layer, head) for layer in range(30) for head in range(3)]
    over = {(cell.column, cell.row) for cell in keys.cells if cell.over}
    assert over == {(layer, head) for layer, head in places if 1 - worst[layer][head] > 0.01} != set()
    assert not any(cell.over for cell in values.cells)  # half the distance, and a limit of its own
    assert (keys.note, values.note) == ("limit 0.99", "limit 0.988")
    assert "a field beyond it is red" in render_report(report, "r")


def test_missing_cosine_is_the_worst():
    prompts = [{"key_min_cosine": [[0.5]]}, {"key_min_cosine": [["nan"]]}, {"key_min_cosine": [[0.9]]}]
    (heat,) = plots.cache_heat_maps({"prompts": prompts}, {"k": 0.6})
    assert (heat.cells[0].heat, heat.cells[0].over) == (1.0, True)


def test_kl_per_token_is_drawn_on_a_logarithmic_axis(report):
    plot = gate_view.divergence_plot(report)
    assert plot is not None
    assert [line.name for line in plot.lines] == ["prompt 0", "prompt 1"]
    flat = plots.step_plot([("a", [1e-3, 1e-2, 1e-1])])
    assert flat is not None
    assert [dot.y for dot in flat.lines[0].dots] == pytest.approx([100.0, 50.0, 0.0])
    assert [tick.text for tick in flat.y_ticks] == ["1e-3", "1e-2", "1e-1"]
    assert plots.step_plot([("a", []), ("b", ["nan"])]) is None


def test_tables_of_the_gates(report):
    tables = {table.title: table for table in view.tables(report)}
    gains = tables["Phase 4: prefill, what each optimisation gains"]
    assert "from 217.90 ms unfused to 125.50 ms, 42.4 % less" in gains.note
    merge, layout = gains.rows
    assert merge[:6] == ["multi-launch merge", "applied", "217.90", "125.50", "42.4", "bit for bit"]
    assert layout == ["layout", "skipped", "", "", "", "", "nothing to change"]
    assert tables["Phase 0: reference"].rows == [["weights", "OK", "not offered: x"]]
    block = tables["Phase 2: block of layer 0"].rows[0]
    assert block[3:] == ["0.999820", "0.999740", "0.991560", "0.750", "OK"]
    assert tables["Length limits"].rows[1][1].startswith("refused: SequenceTooLong")


def test_this_run_stands_above_predictions_and_published_silicon(report):
    comparison = view.comparison(report)
    assert comparison is not None
    run, silicon, unknown = comparison.rows
    checkpoint = "SmolLM2-135M-Instruct, Q4_1 dequantised to bf16"
    assert run[:7] == ["smollm2_135m, this run", "twin (modelled)", checkpoint, "128", "41.3", "11.9", "84.2"]
    assert silicon[3:] == ["2048", "1210.0", "82.0", "12.2", "published 2026-06"]
    assert unknown[4:7] == ["", "0.0", ""]
    assert "<h3>Beside published silicon</h3>" in render_report(report, "r")


def test_records_of_a_newer_shape_do_not_take_the_page_down():
    odd = [
        ("ladder", {"rungs": "many"}),
        ("ladder", {"rungs": [{"name": 3, "measured": None}]}),
        ("teacher_forced", {"prompts": [{"kl": None}]}),
        ("phase0", {"problems": None}),
        ("block", {"rows": [{}], "limits": None}),
        ("optimisation", {"steps": [{}], "baseline_ms": None}),
        ("limits", {}),
        ("cache_check", {"prompts": [{"key_min_cosine": [[0.9]]}]}),
        ("comparison", {"rows": [{}]}),
        ("phase1", {"elements": "all", "baseline": 3}),
    ]
    events = [{"event": "record", "nodeid": "a", "kind": kind, "payload": payload} for kind, payload in odd]
    assert "<h2>Gate ladder</h2>" in render_report(build_run_report("m", events), "r")
