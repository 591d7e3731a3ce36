"""In an unrelated suite the plugin shows nothing, imports nothing heavy and writes nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

UNRELATED = """
import os, sys
def test_nothing_heavy():
    heavy = {"torch", "transformers", "matplotlib", "jinja2", "pydantic", "numpy", "llms", "npu_twin"}
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
def test_only_what_every_run_needs():
    ours = {name.partition(".")[2] for name in sys.modules if name.startswith("pytest_npu.")}
    core = {"core." + name for name in ("flags", "fixtures", "models", "phases", "constants", "exceptions")}
    assert ours <= {"plugin", "newhooks", "core", *core, "bridges", "bridges.benchmark_fixture"}, ours
def test_environment():
    assert "OMP_WAIT_POLICY" not in os.environ
"""


@pytest.mark.parametrize(("args", "plugins"), [(["-v"], ""), (["-n", "1"], "xdist")])
def test_unrelated_suite_sees_nothing_of_it(suite, monkeypatch, args, plugins):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    suite.pytester.makepyfile(UNRELATED)
    result = suite.spawn("-W", "error", *args, plugins=plugins)
    result.assert_outcomes(passed=3)
    shown = [
        line for line in result.outlines if "npu" in line and not line.startswith(("plugins:", "metadata:"))
    ]
    assert shown == []
    assert not (suite.path / "reports").exists()


def test_saved_benchmarks_of_an_unrelated_suite_name_no_device(suite, monkeypatch):
    pytest.importorskip("pytest_benchmark")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    tests = UNRELATED + "def test_speed(benchmark): benchmark(len, 'x')\n"
    suite.pytester.makepyfile(tests)
    save = ("--benchmark-json=b.json", "--benchmark-autosave")
    suite.spawn(*save, plugins="benchmark").assert_outcomes(passed=4)
    assert "npu" not in json.loads((suite.path / "b.json").read_text())["machine_info"]
    again = suite.spawn(*save, "--benchmark-compare", plugins="benchmark")
    again.assert_outcomes(passed=4)


def test_without_pytests_optional_plugins(suite):
    suite.model(a="@pytest.mark.phase1\ndef test_one(npu_record): npu_record('x', 1)")
    off = [
        arg
        for name in ("xdist", "html", "benchmark", "syrupy", "rerunfailures", "timeout")
        for arg in ("-p", f"no:{name}")
    ]
    suite.run(*off).assert_outcomes(passed=1)


def test_performance_test_without_pytest_benchmark_says_what_to_install(suite):
    suite.model(a="def test_perf(npu_benchmark): npu_benchmark(print)")
    result = suite.run("-p", "no:benchmark")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*pip install pytest-benchmark*"])


def test_help_lists_the_options_without_importing_torch(suite):
    code = "import sys, pytest; status = pytest.main(['--help']); sys.exit(status or 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=suite.path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for option in (
        "--npu ",
        "--npu-lock=",
        "--checkpoint=",
        "--npu-model=",
        "--npu-prompts=",
        "--no-phase-order",
        "--npu-report-dir=",
    ):
        assert option in done.stdout


def test_collect_only_writes_no_report(suite):
    suite.model(a="@pytest.mark.phase1\ndef test_one(): pass")
    assert suite.run("--collect-only").ret == 0
    assert not (suite.path / "reports").exists()
