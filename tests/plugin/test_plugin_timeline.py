"""`--npu-trace FILE`: one file per process that runs tests, whatever ends the run."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

USAGE_ERROR = 4

#: A model whose tests run a real kernel on the twin, without torch and weights.
WORK = """
import numpy as np
from ml_dtypes import bfloat16

@pytest.fixture(scope="module")
def add(npu_device, tmp_path_factory):
    from llms.llama_kernel_builder.cache import KernelCache
    from llms.llama_kernel_builder.program import leaf_program
    from llms.llama_kernel_builder.specs import KernelSpec
    spec = KernelSpec.make("eltwise_add", {"n": 1024}, "default", {"tile": 128}, (8, 1))
    cache = KernelCache(tmp_path_factory.mktemp("cache"), driver=npu_device)
    cache.compile_and_cache(leaf_program("add", spec))
    ones = np.ones(1024, bfloat16)
    def run():
        with cache.profiler.section("prefill"):
            cache.load_and_run("add", ones, ones, None)
    yield run
    cache.close()

@pytest.mark.phase1
def test_one(add):
    add()
@pytest.mark.phase2
def test_two(add):
    add()
    add()
"""

#: One more test, after those.
LAST = """
@pytest.mark.phase3
def test_{}(add):
    {}
"""

REAL_DEVICE = """
def pytest_npu_open_device(name):
    from llms.llama_kernel_builder import driver
    return driver.select(name)
"""


@pytest.fixture
def twin(suite: Any) -> Any:
    """A suite whose device is the real twin."""
    suite.pytester.makeconftest(REAL_DEVICE)
    return suite


def slices(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == kind]


def names(path: Path, kind: str) -> list[str]:
    return [event["name"] for event in slices(path, kind)]


def files(suite: Any) -> list[str]:
    return sorted(path.name for path in suite.path.glob("*trace*"))


def test_a_run_writes_its_timeline(twin: Any) -> None:
    twin.model(a=WORK)
    result = twin.spawn("--npu-trace", "trace.json")
    result.assert_outcomes(passed=2)
    path = twin.path / "trace.json"
    document = json.loads(path.read_text())
    assert document["otherData"]["device"] == "twin (modelled)"
    assert names(path, "elf") == ["add"] * 3
    assert names(path, "kernel") == ["add"] * 3
    assert names(path, "section") == ["prefill"] * 3
    assert [name.partition("::")[2] for name in names(path, "test")] == ["test_one", "test_two"]
    first, second = slices(path, "test")
    for test, count in ((first, 1), (second, 2)):
        inside = [
            elf
            for elf in slices(path, "elf")
            if test["ts"] <= elf["ts"] and elf["ts"] + elf["dur"] <= test["ts"] + test["dur"]
        ]
        assert len(inside) == count
    total = sum(event["ph"] == "X" for event in document["traceEvents"])
    result.stdout.fnmatch_lines([f"timeline: trace.json ({total} events)"])
    (event,) = (e for e in twin.events() if e["event"] == "timeline")
    assert (event["path"], event["events"], event["error"]) == (str(path), total, "")
    assert twin.events()[-1]["event"] == "session_finish"


def test_without_the_option_there_is_none(twin: Any) -> None:
    twin.model(a=WORK + LAST.format("off", "from npu_twin import trace; assert trace.sinks == ()"))
    result = twin.spawn()
    result.assert_outcomes(passed=3)
    assert "timeline" not in result.stdout.str()
    assert files(twin) == []


def test_a_failing_and_an_interrupted_run_leave_one_too(twin: Any) -> None:
    twin.model(a=WORK.replace("    add()\n    add()", "    add()\n    raise KeyboardInterrupt"))
    twin.spawn("--npu-trace", "new/trace.json")
    assert names(twin.path / "new" / "trace.json", "elf") == ["add"] * 2


def test_ctrl_c_from_outside(twin: Any) -> None:
    twin.model(a=WORK + LAST.format("slow", "add(); open('reached', 'w').close(); time.sleep(30)"))
    process = twin.start("--npu-trace", "trace.json")
    deadline = time.monotonic() + 30
    while not (twin.path / "reached").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert names(twin.path / "trace.json", "elf") == ["add"] * 4
    assert files(twin) == ["trace.json"]


def test_a_killed_run_leaves_its_events_and_the_next_run_keeps_them(twin: Any) -> None:
    twin.model(a=WORK.replace("    add()\n    add()", "    add()\n    add()\n    os.kill(os.getpid(), 9)"))
    assert twin.spawn("--npu-trace", "trace.json").ret == -signal.SIGKILL
    twin.model(a=WORK)
    result = twin.spawn("--npu-trace", "trace.json")
    result.stdout.fnmatch_lines(["timeline: trace.unfinished-1.json is what a process that died left behind"])
    assert len(slices(twin.path / "trace.unfinished-1.json", "elf")) == 2  # all but the last, which began
    assert len(slices(twin.path / "trace.json", "elf")) == 3
    assert files(twin) == ["trace.json", "trace.unfinished-1.json"]


def test_one_file_per_worker(twin: Any) -> None:
    pytest.importorskip("xdist")
    for name in ("one", "two"):
        twin.model(name, a=WORK)
    result = twin.spawn("-n", "2", "--npu-trace", "trace.json", plugins="xdist")
    result.assert_outcomes(passed=4)
    assert files(twin) == ["trace.gw0.json", "trace.gw1.json"]
    for name in files(twin):
        assert names(twin.path / name, "elf") == ["add"] * 3
        assert len({test.split("/")[1] for test in names(twin.path / name, "test")}) == 1
        result.stdout.fnmatch_lines([f"timeline: {name} (*"])
    for model in ("one", "two"):
        assert [e["event"] for e in twin.events(model)].count("timeline") == 2


@pytest.mark.slow
def test_what_a_crashed_worker_left_is_kept(twin: Any) -> None:
    pytest.importorskip("xdist")
    twin.model(a=WORK + LAST.format("dies", "add(); add(); os._exit(3)"))
    result = twin.spawn("-n", "1", "--npu-trace", "trace.json", plugins="xdist")
    result.stdout.fnmatch_lines(["timeline: trace.gw0.unfinished-1.json is what*"])
    assert len(slices(twin.path / "trace.gw0.unfinished-1.json", "elf")) == 4


@pytest.mark.slow
def test_supervised(twin: Any) -> None:
    twin.model(a=WORK + LAST.format("dies", "add(); add(); os._exit(3)"))
    command = twin.command("--npu-trace", "trace.json", "--npu-supervise")
    done = subprocess.run(command, cwd=twin.path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stdout
    assert files(twin) == ["trace.json", "trace.unfinished-1.json"]
    assert len(slices(twin.path / "trace.unfinished-1.json", "elf")) == 4


@pytest.mark.parametrize("value", ["", "llms"])
def test_what_is_no_file_is_a_usage_error(twin: Any, value: str) -> None:
    twin.model(a=WORK)
    result = twin.spawn(f"--npu-trace={value}")
    assert result.ret == USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--npu-trace '{value}' is no file name*"])


def test_a_place_that_cannot_be_written_is_a_usage_error(twin: Any) -> None:
    twin.model(a=WORK)
    (twin.path / "file").write_text("")
    result = twin.spawn("--npu-trace", "file/trace.json")
    assert result.ret == USAGE_ERROR
    assert "cannot be written" in result.stderr.str() + result.stdout.str()


def test_questions_write_nothing(twin: Any) -> None:
    twin.model(a=WORK)
    assert twin.spawn("--npu-trace", "trace.json", "--collect-only", "-q").ret == 0
    assert files(twin) == []
