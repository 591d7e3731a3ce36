"""Results, plots and texts of the reports, against values worked out by hand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sample_log
from pytest_npu.core.events import EventLog, atomic_write, clip, read_events, to_jsonable
from pytest_npu.core.exceptions import EventLogError, RecordError
from pytest_npu.report import build_run_report, index, plots, view
from pytest_npu.report.render import render_markdown
from pytest_npu.report.results import results_of
from pytest_npu.report.runlogs import RunLogs
from pytest_npu.report.timing import timing_of
from pytest_npu.report.write import write_reports


@pytest.fixture
def report():
    return build_run_report("smollm2_135m", sample_log.events())


def phase(nodeid: str, when: str, outcome: str, **fields) -> dict:
    return {
        "event": "test_phase",
        "nodeid": nodeid,
        "when": when,
        "outcome": outcome,
        "duration_s": 1.0,
        **fields,
    }


def one(*events: dict):
    report = build_run_report("m", [{"t": 1.0, "v": 1, **event} for event in events])
    return report, next(iter(report.tests.values()), None)


def test_sample(report):
    assert report.verdict == "FAIL"
    assert report.counts == {"error": 1, "failed": 1, "passed": 6, "blocked": 1}
    assert {p.phase: p.verdict for p in report.phases} == {
        0: "PASS",
        1: "PASS",
        2: "PASS",
        6: "FAIL",
        7: "BLOCKED",
    }
    assert report.lock_wait_s == pytest.approx(0.7)
    assert view.headline(report).startswith(
        "First problem: test_phase6_topk_gate.py::test_gate: AssertionError"
    )


@pytest.mark.parametrize(
    ("events", "outcome", "verdict"),
    [
        (
            [phase("a", "setup", "passed"), phase("a", "call", "passed"), phase("a", "teardown", "passed")],
            "passed",
            "PASS",
        ),
        ([phase("a", "setup", "failed")], "error", "FAIL"),
        ([phase("a", "setup", "passed"), phase("a", "call", "failed")], "failed", "FAIL"),
        ([phase("a", "call", "failed"), phase("a", "teardown", "failed")], "error", "FAIL"),
        ([phase("a", "call", "passed"), phase("a", "teardown", "failed")], "error", "FAIL"),
        ([phase("a", "call", "skipped", wasxfail="known")], "xfailed", "PASS"),
        ([phase("a", "call", "passed", wasxfail="known")], "xpassed", "PASS"),
        ([phase("a", "setup", "skipped")], "skipped", "EMPTY"),
        ([phase("a", "setup", "skipped", blocked_by="b")], "blocked", "FAIL"),
    ],
)
def test_outcomes(events, outcome, verdict):
    finish = [{"event": "test_finish", "nodeid": "a"}, {"event": "session_finish", "exit_status": 0}]
    report, test = one({"event": "test_start", "nodeid": "a"}, *events, *finish)
    assert (test.outcome, report.verdict) == (outcome, verdict)


def test_run_without_an_end_is_incomplete_even_if_everything_so_far_passed():
    report, test = one({"event": "test_start", "nodeid": "a"}, phase("a", "call", "passed"))
    assert test.outcome == "interrupted"
    assert report.verdict == "INCOMPLETE"
    report, _ = one(
        {"event": "test_start", "nodeid": "a"},
        phase("a", "call", "passed"),
        {"event": "test_finish", "nodeid": "a"},
    )
    assert report.verdict == "INCOMPLETE"


def test_selected_test_that_never_ran_is_no_pass():
    collected = {"event": "collected", "tests": [{"nodeid": "a"}, {"nodeid": "b"}]}
    done = [
        {"event": "test_start", "nodeid": "a"},
        phase("a", "call", "passed"),
        {"event": "test_finish", "nodeid": "a"},
    ]
    report, _ = one(collected, *done, {"event": "session_finish", "exit_status": 0})
    assert report.counts == {"not run": 1, "passed": 1}
    assert report.verdict == "INCOMPLETE"


def test_empty_run_is_no_pass():
    assert one({"event": "session_finish", "exit_status": 5})[0].verdict == "EMPTY"


def test_cosine_plot_puts_values_where_they_belong():
    rows = [
        {"layer": 0, "path": "prefill", "probe": "ffn_out", "cos_median": 1.0, "cos_min": 0.9},
        {"layer": 4, "path": "prefill", "probe": "final_norm", "cos_median": 0.95, "cos_min": 0.9},
        {"layer": 2, "path": "decode", "probe": "ffn_out", "cos_median": "nan", "cos_min": 0.1},
    ]
    plot = plots.cosine_plot(rows)
    assert [line.name for line in plot.lines] == ["prefill"]  # nan is no point
    (first, second) = plot.lines[0].dots
    assert (first.x, first.y) == (0.0, 0.0)
    assert (second.x, second.y) == (
        100.0,
        pytest.approx(50.0),
    )  # between 1.0 at the top and 0.9 at the bottom
    assert (plot.y_ticks[0].text, plot.y_ticks[0].at) == ("0.900", 100.0)
    assert "worst 0.9" in second.text
    assert plots.cosine_plot([]) is None


@pytest.mark.parametrize("worst", [1.0, 1.0 - 2e-16, 1.0 - 1e-13, 1.0 - 1e-9])
def test_cosine_plot_of_equal_sides(worst):
    """A device that computes what the reference computes has a plot, too."""
    rows = [{"layer": n, "path": "prefill", "cos_median": 1.0, "cos_min": worst} for n in range(3)]
    plot = plots.cosine_plot(rows)
    assert plot.lines[0].dots[0].y == pytest.approx(0.0, abs=1e-6)
    assert float(plot.y_ticks[0].text) == pytest.approx(0.999999)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.94, 1.0, [0.94, 0.96, 0.98, 1.0]),
        (1.0, 1.0, [1.0, 1.25, 1.5, 1.75, 2.0]),
    ],
)
def test_nice_ticks(low, high, expected):
    assert plots.nice_ticks(low, high) == pytest.approx(expected)


def test_breakdown_bars_sum_up_what_is_small():
    rows = [{"name": f"k{i}", "kind": "elf", "calls": 1, "total_ms": 10.0 - i} for i in range(8)]
    bars = plots.breakdown_bars(rows, whole=52.0, limit=3)
    assert [bar.label for bar in bars] == ["k0", "k1", "k2", "5 others"]
    assert bars[0].value == "10.00 ms, 19 %"
    assert bars[1].width == pytest.approx(90.0)
    assert bars[3].value == "25.00 ms, 48 %"  # 7 + 6 + 5 + 4 + 3
    assert plots.breakdown_bars([], 1.0) == []


def test_kernels_do_not_count_twice(report):
    sections = dict(view.profile(report).sections)
    assert list(sections) == [
        "prefill",
        "prefill: kernels inside the ELFs",
        "decode",
        "decode: kernels inside the ELFs",
    ]
    # decode without kernels: 4.1 + 5.2 + 1.9 + 0.4 + 0.8 + 0.5 = 12.9
    assert sections["decode"][0].value == "5.20 ms, 40 %"
    assert [bar.label for bar in sections["decode: kernels inside the ELFs"]] == ["Down", "LM head"]


def test_times_come_from_benchmarks_when_there_is_no_profile():
    def bench(name: str, median: float, **fields) -> dict:
        payload = {"name": name, "median": median, "device": "twin (modelled)", "seq_len": 128, **fields}
        return {"event": "record", "kind": "benchmark", "nodeid": "x", "payload": payload}

    row = {"section": "decode", "kind": "elf", "name": "a", "total_ms": 1.0}
    report, _ = one(
        bench("test_ttft", 0.5),
        bench("test_time_per_output_token", 0.02, breakdown=[row]),
        bench("test_x", 9.0),
    )
    timing = timing_of(report)
    assert (timing.ttft_ms, timing.tpot_ms, timing.tps) == (500.0, 20.0, 50.0)
    assert timing.rows == [row]
    report, _ = one(bench("test_x", 0.03, metric="tpot"))
    assert timing_of(report).tpot_ms == 30.0
    assert timing_of(one()[0]) is None


def test_heat_map_is_logarithmic():
    rows = [
        {"layer": layer, "head": 0, "tensor": "k", "cos_min": cosine}
        for layer, cosine in enumerate((1.0, 0.999, 0.0))
    ]
    (heat,) = plots.cache_heat_maps({"rows": rows})
    assert [round(cell.heat, 3) for cell in heat.cells] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" the", "␣the"), ("a b ", "a b␣"), ("\n", "↵"), ("", "∅"), ("  ", "␣␣"), (None, "none"), ("\tx", "⇥x")],
)
def test_tokens_show_their_white_space(text, shown):
    assert view.visible(text) == shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.123, "0.12 s"), (12.34, "12.3 s"), (185, "3 min 05 s"), (3723, "1 h 02 min")]
)
def test_durations(seconds, text):
    assert view.duration_text(seconds) == text


def test_markdown_keeps_its_tables_whole(report):
    text = render_markdown(report, "r")
    assert "three languages \\| one per line." in text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    for table in tables:
        counts = {line.replace("\\|", "").count("|") for line in table.splitlines()}
        assert len(counts) == 1, table


def test_reader_leaves_out_a_torn_last_line_and_refuses_others(tmp_path):
    log = tmp_path / "events.jsonl"
    log.write_text('{"v": 1, "event": "a"}\n{"v": 1, "ev')
    assert [event["event"] for event in read_events(log)] == ["a"]
    log.write_text('{"v": 1, "event": "a"}\ntorn\n{"v": 1, "event": "b"}\n')
    with pytest.raises(EventLogError, match="line 2 is no event"):
        list(read_events(log))
    log.write_text('{"v": 2, "event": "a"}\n')
    with pytest.raises(EventLogError, match="update pytest-npu"):
        list(read_events(log))
    with pytest.raises(EventLogError, match="cannot read"):
        list(read_events(tmp_path / "missing"))


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "x"
    atomic_write(path, "old")

    def fail(self, data, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_long_texts_are_cut_in_the_middle_and_say_so():
    text = clip("a" * 100 + "b" * 100, 20)
    assert text.startswith("a" * 10 + "\n... 180 characters cut")
    assert text.endswith("b" * 10)
    assert clip("short") == "short"


def test_payload_keys_must_be_plain():
    assert to_jsonable({1: float("inf")}) == {"1": "inf"}
    with pytest.raises(RecordError, match="keys must be text"):
        to_jsonable({(1, 2): 3})


def test_short_write_counts_as_a_full_disk(tmp_path, monkeypatch):
    log = EventLog(tmp_path / "events.jsonl")
    log.append({"event": "a"})
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
    log.append({"event": "b"})
    monkeypatch.undo()
    log.append({"event": "c"})
    assert log.error is not None
    assert [event["event"] for event in log.events()] == ["a", "b", "c"]
    assert [event["event"] for event in read_events(log.path)] == ["a"]


def test_logs_stay_in_memory_when_nothing_can_be_written(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(blocked))
    logs = RunLogs(blocked / "reports", "run")
    logs.emit({"event": "session_start", "model": None, "t": 1.0})
    logs.emit({"event": "test_start", "model": "m", "nodeid": "a", "t": 2.0})
    assert [event["event"] for event in logs.events("m")] == ["session_start", "test_start"]
    assert "cannot be written" in logs.fallback_reason
    assert "m" in logs.errors()
    (written,) = write_reports(logs)
    assert written.error is not None
    assert written.report.counts == {"interrupted": 1}
    logs.close()


def test_index_reads_the_newest_runs_and_counts_the_others(tmp_path):
    for number in range(index.MAX_HISTORY + 5):
        folder = tmp_path / "m" / f"{number:03}"
        folder.mkdir(parents=True)
        results = results_of(build_run_report("m", sample_log.events(t0=1.79e9 + number)), folder.name)
        (folder / "results.json").write_text(json.dumps(results))
        os.utime(folder, (number, number))
    (tmp_path / "m" / "000" / "results.json").write_text("{torn")
    (model,) = index.collect_models(tmp_path)
    assert [run.run for run in model.runs] == [f"{n:03}" for n in range(44, 44 - index.MAX_ROWS, -1)]
    assert model.older == 45 - index.MAX_ROWS
    assert len(model.history) == index.MAX_HISTORY
    assert model.tpot == pytest.approx(11.87)


def test_kernels_in_tier_are_counted_by_phase_and_shown_worst_first():
    from pytest_npu.core.terminal import summary_lines

    kernels = [("ok", 0, 1e-3), ("some", 3, 2e-3), ("more", 12, 2e-3), ("bad", 21, 9e-3)]
    found = []
    for name, over, error in kernels:
        payload = sample_log.kernel_payload(name, over, error)
        found += [
            {"event": "test_start", "nodeid": name, "phase": 1},
            {"event": "record", "nodeid": name, "kind": "phase1", "payload": payload},
            phase(name, "call", "failed" if name == "bad" else "passed"),
            {"event": "test_finish", "nodeid": name},
        ]
    report = build_run_report("m", found)
    assert [(row.phase, row.in_tier) for row in report.phases] == [(1, 2)]
    assert [(row.name, row.status) for row in view.kernels(report)] == [
        ("bad", "FAIL"),
        ("some", "in tier"),
        ("more", "in tier"),
        ("ok", "pass"),
    ]
    lines = summary_lines(report)
    assert any("1 failed, 3 passed (2 in tier)" in line for line in lines)
    assert "in tier: 2 of 4 kernels" in lines[-1]
    assert "most in more: 12 of 147456, 20 allowed" in lines[-1]
    assert results_of(report, "r")["phases"][0]["in_tier"] == 2
    assert "| more | drain | 32 | 2.00e-03 | 4.00e-03 | 12 of 147456, 20 allowed |" in render_markdown(
        report, "r"
    )
    assert not [kind for kind, _, _ in view.other_records(report) if kind.startswith("phase1")]


def test_kernel_record_of_another_shape_is_listed_as_it_is():
    report = build_run_report("m", [{"event": "record", "nodeid": "a", "kind": "phase1", "payload": [1]}])
    assert report.kernels == []
    assert view.other_records(report)[0][0] == "phase1, unexpected shape"


def test_regression_fails_the_run_and_its_phase_but_not_the_test():
    report, test = one(
        {"event": "test_start", "nodeid": "a", "phase": 6},
        phase("a", "call", "passed"),
        {"event": "test_finish", "nodeid": "a"},
        {"event": "regression", "nodeid": "a", "phase": 6, "reason": "slower than in x.json: +9 %"},
        {"event": "session_finish", "exit_status": 1},
    )
    assert (test.outcome, report.verdict, report.phases[0].verdict) == ("passed", "FAIL", "FAIL")
    assert view.headline(report) == "Performance: a slower than in x.json: +9 %."


def test_trend_of_noise_is_flat_and_a_real_one_is_not():
    def height(*values: float) -> float:
        ys = [float(pair.split()[1]) for pair in plots.sparkline(values).replace("M", "").split("L")]
        return max(ys) - min(ys)

    assert height(4.990, 4.991) < 1.0
    assert height(5.0, 5.0) == 0.0
    assert height(5.0, 10.0) == pytest.approx(80.0)
    assert plots.sparkline([5.0]) == ""


def write_runs(root: Path, model: str, runs: list[tuple[str, float]]) -> None:
    for number, (checkpoint, tpot) in enumerate(runs):
        folder = root / model / f"run{number}"
        folder.mkdir(parents=True)
        results = {
            "verdict": "PASS",
            "counts": {"passed": 1},
            "device": {"label": "twin (modelled)"},
            "deployment": {"checkpoint": {"label": checkpoint}},
            "started_at": 1.79e9 + number,
            "duration_s": 1.0,
            "timing": {"ttft_ms": 10.0, "tpot_ms": tpot},
        }
        (folder / "results.json").write_text(json.dumps(results))


def test_trend_has_one_checkpoint_and_tests_of_no_model_come_last(tmp_path):
    write_runs(tmp_path, "zeta", [("real", 50.0), ("tiny", 5.0), ("tiny", 6.0)])
    write_runs(tmp_path, "framework", [("none", 1.0)])
    zeta, framework = index.collect_models(tmp_path)
    assert (zeta.name, framework.name) == ("zeta", "framework")
    assert zeta.trend_text == "5.00 to 6.00 ms, twin (modelled)"
    page = index.write_index(tmp_path).read_text()
    assert ">1 model ·" in page
