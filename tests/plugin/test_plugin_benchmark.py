"""pytest-benchmark on the device clock."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("pytest_benchmark")

PERF = """
@pytest.mark.phase6
def test_ttft(npu_benchmark, device_clock, deployment):
    def prefill():
        device_clock.seconds += float(os.environ.get("TTFT", "0.04"))
        return "token"
    rows = lambda: [{"name": "flash_attn", "total_ms": 1.5}]
    got = npu_benchmark(prefill, seq_len=128, breakdown=rows, kind="warm")
    assert got == "token"
def test_other(): pass
"""


def test_times_are_those_of_the_device_clock(suite):
    suite.model(a=PERF)
    suite.spawn("--benchmark-json=b.json", plugins="benchmark").assert_outcomes(passed=2)
    saved = json.loads((suite.path / "b.json").read_text())
    bench = saved["benchmarks"][0]
    assert bench["stats"]["median"] == pytest.approx(0.04)
    assert bench["stats"]["rounds"] == 3
    assert bench["options"]["timer"].endswith("device_clock_seconds")
    assert bench["extra_info"] == {
        "device": "twin (modelled)",
        "checkpoint": "Tiny, random weights",
        "seq_len": 128,
        "breakdown": [{"name": "flash_attn", "total_ms": 1.5}],
        "kind": "warm",
    }
    assert saved["machine_info"]["npu"] == {"device": "twin (modelled)"}
    record = next(r["payload"] for r in suite.results()["records"] if r["kind"] == "benchmark")
    assert record["median"] == pytest.approx(0.04)
    assert "test_ttft" in (suite.runs()[-1] / "report.html").read_text()


def test_benchmark_only_selects_performance_tests(suite):
    suite.model(a=PERF)
    suite.spawn("--benchmark-only", plugins="benchmark").assert_outcomes(passed=1, skipped=1)


def test_compare_fail_sees_a_slower_device(suite, monkeypatch):
    suite.model(a=PERF)
    suite.spawn("--benchmark-autosave", "--benchmark-only", plugins="benchmark").assert_outcomes(
        passed=1, skipped=1
    )
    again = ("--benchmark-only", "--benchmark-compare", "--benchmark-compare-fail=median:5%")
    assert suite.spawn(*again, plugins="benchmark").ret == 0
    monkeypatch.setenv("TTFT", "0.0415")
    assert suite.spawn(*again, plugins="benchmark").ret == 0  # 3.75 % slower
    monkeypatch.setenv("TTFT", "0.0425")
    result = suite.spawn(*again, plugins="benchmark")
    assert result.ret != 0
    assert "Performance has regressed" in result.stdout.str() + result.stderr.str()
    assert suite.runs()[-1].joinpath("report.html").exists()


def test_comparing_times_of_different_devices_is_refused_with_the_reason(suite):
    suite.model(a=PERF)
    suite.spawn("--benchmark-autosave", "--benchmark-only", plugins="benchmark")
    saved = next((suite.path / ".benchmarks").rglob("*.json"))
    content = json.loads(saved.read_text())
    content["machine_info"]["npu"] = {"device": "npu2 (measured)", "firmware": "1.5"}
    saved.write_text(json.dumps(content))
    result = suite.spawn("--benchmark-only", "--benchmark-compare", plugins="benchmark")
    assert result.ret == 4
    assert "device: npu2 (measured) then, twin (modelled) now" in result.stderr.str()


def test_performance_test_without_a_record_fails(suite):
    suite.model(a="def test_lazy(npu_benchmark): pass")
    result = suite.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*is a performance test (it uses npu_benchmark) but measured nothing*"])
    assert suite.outcomes() == {"test_lazy": "failed"}


def test_measurement_without_device_work_fails(suite):
    suite.model(a="def test_host_only(npu_benchmark): npu_benchmark(lambda: time.sleep(0.01))")
    result = suite.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*device clock (twin (modelled)) did not move*"])


def test_disabled_benchmarks_still_leave_a_record(suite):
    suite.model(a=PERF)
    suite.run("--benchmark-disable").assert_outcomes(passed=2)
    record = next(r["payload"] for r in suite.results()["records"] if r["kind"] == "benchmark")
    assert (record["disabled"], record["rounds"]) == (True, 1)


def test_more_rounds_on_silicon(suite, monkeypatch):
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    suite.model(a=PERF)
    suite.run("--npu", "--no-npu-supervise").assert_outcomes(passed=2)
    record = next(r["payload"] for r in suite.results()["records"] if r["kind"] == "benchmark")
    assert (record["rounds"], record["warmup_rounds"], record["device"]) == (20, 5, "npu2 (measured)")


def test_timer_that_a_test_chose_itself_is_kept(suite):
    suite.model(a="@pytest.mark.benchmark(timer=time.process_time)\n" + PERF.lstrip())
    suite.spawn("--benchmark-json=b.json", plugins="benchmark")
    assert (
        json.loads((suite.path / "b.json").read_text())["benchmarks"][0]["options"]["timer"] == "process_time"
    )


def test_npu_benchmark_only_with_npu_is_exit_4_here(suite):
    suite.model(a=PERF)
    assert suite.spawn("--npu", "--benchmark-only", plugins="benchmark").ret == 4
