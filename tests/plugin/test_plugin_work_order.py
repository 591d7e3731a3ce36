"""Parallel runs: the longest model first, cores shared by the workers of one host."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_npu.core.work_order import LongestFirst, known_durations

QUICK = "def test_x(): time.sleep(0.01)\ndef test_y(): pass\ndef test_z(): pass\n"
SLOW = "def test_x(): time.sleep(0.3)\ndef test_y(): pass\ndef test_z(): pass\n"


def write_run(folder: Path, durations: dict[str, float], age: float) -> None:
    folder.mkdir(parents=True)
    tests = [{"nodeid": nodeid, "duration_s": seconds} for nodeid, seconds in durations.items()]
    (folder / "results.json").write_text(json.dumps({"tests": tests}))
    os.utime(folder / "results.json", (age, age))


def test_newest_run_wins_and_older_ones_fill_in(tmp_path):
    write_run(tmp_path / "m" / "b", {"x": 1.0, "y": 2.0}, 100)
    write_run(tmp_path / "m" / "a", {"x": 9.0}, 200)
    write_run(tmp_path / "other" / "a", {"z": 9.0}, 200)
    (tmp_path / "m" / "c").mkdir()
    (tmp_path / "m" / "c" / "results.json").write_text("torn")
    assert known_durations(tmp_path, ["m", "missing"]) == {"x": 9.0, "y": 2.0}


def test_queue_gives_the_longest_unit_first_and_keeps_the_order_of_equals():
    queue = LongestFirst(lambda: {"b1": 1.0, "b2": 1.5, "c1": 2.0})
    for name in "abcd":
        queue[name] = {f"{name}1": False, f"{name}2": False}
    assert [queue.popitem(last=False)[0] for _ in range(4)] == ["b", "c", "a", "d"]
    with pytest.raises(KeyError):
        queue.popitem(last=False)


def test_model_that_took_longest_is_started_first(suite):
    pytest.importorskip("xdist")
    for name in ("a", "b", "c"):
        suite.model(name, a=QUICK)
    suite.model("d", a=SLOW)
    for _ in range(2):
        suite.spawn("-n", "2", plugins="xdist").assert_outcomes(passed=12)
    begin = {
        name: min(event["t"] for event in suite.events(name) if event["event"] == "test_start")
        for name in "abcd"
    }
    assert begin["d"] <= sorted(begin.values())[1]


SPECS = ["ssh=one//id=a", "ssh=one//id=b", "ssh=two", "popen//id=c"]


@pytest.mark.parametrize(("spec", "expected"), list(zip(SPECS, [2, 2, 1, 1], strict=True)))
def test_workers_of_one_host_share_its_cores(spec, expected):
    execnet = pytest.importorskip("execnet")
    pytest.importorskip("xdist")
    from pytest_npu.bridges.xdist import _workers_on_host

    config: Any = SimpleNamespace(getvalue=lambda name: SPECS, option=SimpleNamespace(maxprocesses=None))
    assert _workers_on_host(config, execnet.XSpec(spec)) == expected
