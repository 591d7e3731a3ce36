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
    suite.spawn("--benchmark-only", plugins="benchmark").assert_outcomes(passed=1, deselected=1)
    assert suite.results()["counts"] == {"passed": 1}


def test_compare_fail_sees_a_slower_device(suite, monkeypatch):
    suite.model(a=PERF)
    suite.spawn("--benchmark-autosave", "--benchmark-only", plugins="benchmark").assert_outcomes(
        passed=1, deselected=1
    )
    again = ("--benchmark-only", "--benchmark-compare", "--benchmark-compare-fail=median:5%")
    assert suite.spawn(*again, plugins="benchmark").ret == 0
    monkeypatch.setenv("TTFT", "0.0415")
    assert suite.spawn(*again, plugins="benchmark").ret == 0  # 3.75 % slower
    monkeypatch.setenv("TTFT", "0.0425")
    result = suite.spawn(*again, plugins="benchmark")
    assert result.ret != 0
    assert "Performance has regressed" in result.stdout.str() + result.stderr.str()
    reason = "slower than in 0001_unversioned_*.json: median 40.000 ms then, 42.500 ms now, +6.2 %"
    result.stdout.fnmatch_lines(["6 finalize  FAIL *", f"test_ttft {reason}", "FAIL: 1 passed; 1 regression"])
    results = suite.results()
    assert (results["verdict"], results["exit_status"]) == ("FAIL", 1)
    assert "slower than" in results["regressions"][0]["reason"]
    assert [phase["verdict"] for phase in results["phases"]] == ["FAIL"]
    for name in ("report.html", "evaluation_report.md", "junit.xml"):
        assert "42.500 ms now" in (suite.runs()[-1] / name).read_text()


def test_regression_counts_without_a_terminal_too(suite, monkeypatch):
    """pytest-benchmark itself says nothing and ends with exit code 0 then."""
    suite.model(a=PERF)
    suite.spawn("--benchmark-autosave", "--benchmark-only", plugins="benchmark")
    monkeypatch.setenv("TTFT", "0.0425")
    again = ("--benchmark-only", "--benchmark-compare", "--benchmark-compare-fail=median:5%")
    assert suite.spawn(*again, "-p", "no:terminal", plugins="benchmark").ret == 1
    assert suite.results()["verdict"] == "FAIL"


def test_times_of_another_checkpoint_or_length_are_not_compared(suite, monkeypatch):
    suite.model(a=PERF)
    suite.spawn("--benchmark-autosave", "--benchmark-only", plugins="benchmark")
    saved = next((suite.path / ".benchmarks").rglob("*.json"))
    content = json.loads(saved.read_text())
    content["benchmarks"][0]["extra_info"]["checkpoint"] = "Llama-3.2-1B-Instruct"
    saved.write_text(json.dumps(content))
    result = suite.spawn("--benchmark-only", "--benchmark-compare", plugins="benchmark")
    assert result.ret == 1
    assert "checkpoint 'Llama-3.2-1B-Instruct' then, 'Tiny, random weights' now" in result.stdout.str()
    assert "(0001_" not in result.stdout.str()  # no row of the other run in the table
    assert suite.results()["verdict"] == "FAIL"


@pytest.mark.slow
def test_measurement_made_before_a_crash_is_in_the_file_and_compared(suite, monkeypatch):
    dies = "\n@pytest.mark.phase6\ndef test_z_dies():\n    if os.environ.get('DIE'): os._exit(3)\n"
    last = "\n@pytest.mark.phase6\ndef test_zz_last(npu_benchmark, device_clock):\n"
    last += "    def run(): device_clock.seconds += 1\n    npu_benchmark(run)\n"
    suite.model(a=PERF + dies + last)
    save = ("--npu-supervise", "--benchmark-json=b.json")
    suite.spawn(*save, "--benchmark-autosave", plugins="benchmark").assert_outcomes(passed=4)
    whole = json.loads((suite.path / "b.json").read_text())["benchmarks"]
    monkeypatch.setenv("DIE", "1")
    monkeypatch.setenv("TTFT", "0.05")
    compare = ("--benchmark-compare", "--benchmark-compare-fail=median:5%")
    result = suite.spawn(*save, *compare, plugins="benchmark")
    assert result.ret == 1
    found = json.loads((suite.path / "b.json").read_text())["benchmarks"]
    assert [bench["name"] for bench in found] == ["test_ttft", "test_zz_last"]
    assert set(found[0]) == set(whole[0])
    assert found[0]["stats"]["data"] == pytest.approx([0.05] * 3)
    assert found[0]["extra_info"]["checkpoint"] == "Tiny, random weights"
    assert "median 40.000 ms then, 50.000 ms now" in suite.results()["regressions"][0]["reason"]
    result.stdout.fnmatch_lines(["test_ttft slower than*", "FAIL: 1 crashed, 3 passed; 1 regression"])


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
