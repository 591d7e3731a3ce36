"""Timeline of the toolkit: what is in the file, on both kinds of clock, and what is left after a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llms.llama_kernel_builder import driver, host_ops, timeline
from llms.llama_kernel_builder.cache import KernelCache
from llms.llama_kernel_builder.driver import Driver, WallClock
from llms.llama_kernel_builder.exceptions import KernelRunError
from llms.llama_kernel_builder.program import Buffer, Program, leaf_program
from llms.llama_kernel_builder.specs import KernelSpec
from llms.llama_kernel_builder.stitch import Part, stitch
from llms.llama_kernel_builder.timeline import Timeline, TimelineError, keep_unfinished
from llms.llama_kernel_builder.toolchains.seam import TwinToolchain
from npu_twin import injection, pyxrt, trace

N = 1024
FIELDS = {"name", "ph", "ts", "dur", "pid", "tid"}


def twice() -> Program:
    """out = (a + b) + b: two launches in one ELF, b static."""
    leaf = leaf_program("add", KernelSpec.make("eltwise_add", {"n": N}, "default", {"tile": 128}, (8, 1)))
    buffers = [
        Buffer("a", (N,)),
        Buffer("b", (N,), role="static"),
        Buffer("mid", (N,), role="intermediate"),
        Buffer("out", (N,), role="output"),
    ]
    parts = [
        Part("first", leaf, {"a": "a", "b": "b", "out": "mid"}),
        Part("second", leaf, {"a": "mid", "b": "b", "out": "out"}),
    ]
    return stitch("twice", buffers, parts)


def vector() -> np.ndarray:
    return (np.arange(N) % 64).astype(bfloat16)


def make_cache(folder: Path, device: Driver) -> KernelCache:
    made = KernelCache(folder / "cache", driver=device, toolchain=TwinToolchain())  # what pyxrt here can load
    made.compile_and_cache(twice())
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Any:
    made = make_cache(tmp_path, driver.select("twin"))
    yield made
    made.close()


def work(cache: KernelCache, runs: int = 3) -> None:
    with cache.profiler.section("prefill"):
        host_ops.embed(cache.profiler, np.zeros((8, N), bfloat16), np.arange(4))
        cache.load_and_run("twice", vector(), vector(), None, None)
    with cache.profiler.section("decode"):
        for _ in range(runs - 1):
            cache.load_and_run("twice", vector(), None, None, None)


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def slices(document: dict[str, Any], kind: str = "") -> list[dict[str, Any]]:
    return [e for e in document["traceEvents"] if e["ph"] == "X" and (not kind or e["cat"] == kind)]


def tracks(document: dict[str, Any]) -> dict[tuple[int, int], str]:
    named = [e for e in document["traceEvents"] if e["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in named}


def total_us(events: list[dict[str, Any]]) -> float:
    return float(sum(e["dur"] for e in events))


def check_schema(document: dict[str, Any]) -> None:
    """What a viewer needs: complete events on named tracks, and slices of a track that nest or follow."""
    names = tracks(document)
    by_track = defaultdict(list)
    for event in document["traceEvents"]:
        assert event.keys() >= FIELDS, event
        assert event["ph"] in "XM"
        assert event["dur"] >= 0
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in names
            by_track[event["pid"], event["tid"]].append(
                (round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3), event["name"])
            )
    for events in by_track.values():
        open_ends: list[int] = []
        for first, last, name in sorted(events, key=lambda e: (e[0], -e[1])):
            while open_ends and open_ends[-1] <= first:
                open_ends.pop()
            assert not open_ends or last <= open_ends[-1], f"{name} crosses the end of the slice around it"
            open_ends.append(last)


def test_everything_of_a_run_is_there(cache: KernelCache, tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    with Timeline(path) as recorded:
        work(cache)
    document = load(path)
    check_schema(document)
    assert recorded.events == len(slices(document))
    assert document["otherData"]["device"] == "twin (modelled)"
    (process,) = [e for e in document["traceEvents"] if e["name"] == "process_name"]
    assert process["args"]["name"] == "twin (modelled)"
    names = tracks(document)
    assert set(names.values()) == {"host", "NPU", "sections"}
    by_kind = {kind: slices(document, kind) for kind in {e["cat"] for e in slices(document)}}
    assert {k: len(v) for k, v in by_kind.items()} == {
        "elf": 3, "kernel": 6, "submit": 3, "wait": 3, "bo_write": 4, "bo_read": 3, "host": 1, "section": 2,
    }  # fmt: skip
    assert [e["name"] for e in by_kind["section"]] == ["prefill", "decode"]
    assert [e["name"] for e in by_kind["kernel"]][:2] == ["first", "second"]
    assert by_kind["kernel"][0]["args"] == {"elf": "twice", "op": "eltwise_add"}
    assert {e["name"] for e in by_kind["bo_write"]} == {"twice.a", "twice.b"}
    assert {e["args"]["bytes"] for e in by_kind["bo_write"]} == {2 * N}
    assert by_kind["host"][0]["name"] == "embed_lookup"
    tracks_of = {kind: {names[e["pid"], e["tid"]] for e in events} for kind, events in by_kind.items()}
    assert tracks_of["elf"] == tracks_of["kernel"] == {"NPU"}
    assert tracks_of["wait"] == tracks_of["bo_read"] == tracks_of["host"] == {"host"}


def test_durations_are_those_of_the_profiler(cache: KernelCache, tmp_path: Path) -> None:
    cache.load_and_run("twice", vector(), vector(), None, None)
    cache.profiler.enabled = True
    with Timeline(tmp_path / "trace.json"):
        work(cache)
    document = load(tmp_path / "trace.json")
    for kind in ("elf", "kernel", "host", "bo_write", "bo_read"):
        entries = [e for (_, found, _), e in cache.profiler.entries.items() if found == kind]
        recorded = slices(document, kind)
        assert total_us(recorded) == pytest.approx(sum(e.total_s for e in entries) * 1e6, abs=0.01), kind
        assert len(recorded) == sum(e.calls for e in entries)
    assert total_us(slices(document, "elf")) > total_us(slices(document, "kernel")) > 0
    submits, waits = slices(document, "submit"), slices(document, "wait")
    assert total_us(submits) + total_us(waits) == pytest.approx(total_us(slices(document, "elf")), abs=0.02)


def test_measured_time_has_no_launches(tmp_path: Path) -> None:
    """The path of silicon: a wall clock, a driver that reports nothing of a launch."""
    device = Driver("npu2", pyxrt, WallClock.label, WallClock())
    cache = make_cache(tmp_path, device)
    with Timeline(tmp_path / "trace.json", device=device):
        work(cache)
    cache.close()
    document = load(tmp_path / "trace.json")
    check_schema(document)
    assert document["otherData"]["device"] == "npu2 (measured)"
    assert not slices(document, "kernel")
    assert len(slices(document, "elf")) == 3
    assert total_us(slices(document, "elf")) > 0


def test_two_clocks_are_two_processes(cache: KernelCache, tmp_path: Path) -> None:
    device = Driver("npu2", pyxrt, WallClock.label, WallClock())
    other = make_cache(tmp_path / "other", device)
    with Timeline(tmp_path / "trace.json", device=device):
        work(other)
        work(cache)
    other.close()
    document = load(tmp_path / "trace.json")
    check_schema(document)
    assert min(e["ts"] for e in slices(document, "elf") if e["pid"] == 2) > 0
    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "npu2 (measured)", 2: "twin (modelled)"}
    assert {pid: sum(e["pid"] == pid for e in slices(document, "elf")) for pid in names} == {1: 3, 2: 3}


def test_off_it_leaves_nothing_behind(cache: KernelCache, tmp_path: Path) -> None:
    with Timeline(tmp_path / "trace.json"):
        assert trace.sinks
    assert (timeline.recorders, trace.sinks) == ((), ())
    before = load(tmp_path / "trace.json")
    work(cache)
    assert load(tmp_path / "trace.json") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "trace.json"]


def test_timelines_nest(cache: KernelCache, tmp_path: Path) -> None:
    with Timeline(tmp_path / "outer.json"):
        work(cache, 1)
        with Timeline(tmp_path / "inner.json"):
            work(cache, 2)
    counts = [len(slices(load(tmp_path / f"{name}.json"), "kernel")) for name in ("outer", "inner")]
    assert counts == [6, 4]


def test_a_run_that_fails_is_on_it_with_its_state(cache: KernelCache, tmp_path: Path) -> None:
    with pytest.raises(KernelRunError), Timeline(tmp_path / "trace.json"), injection.never_complete():
        work(cache)
    document = load(tmp_path / "trace.json")
    check_schema(document)
    (elf,) = slices(document, "elf")
    assert elf["args"]["state"] == "ERT_CMD_STATE_TIMEOUT"
    assert elf["dur"] == pytest.approx(1e4 * 1e3, rel=0.01)
    assert not slices(document, "kernel")


def test_an_interrupt_leaves_a_complete_file(cache: KernelCache, tmp_path: Path) -> None:
    def interrupted() -> None:
        with Timeline(tmp_path / "trace.json"):
            work(cache)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(slices(load(tmp_path / "trace.json"), "elf")) == 3
    assert not list(tmp_path.glob("*.part"))


CHILD = """
import os, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from test_toolkit_timeline import Timeline, driver, make_cache, work
folder = Path({tmp!r})
cache = make_cache(folder, driver.select("twin"))
recorded = Timeline(folder / "trace.json").__enter__()
work(cache)
work(cache, 1)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "elfs"),
    [("os.kill(os.getpid(), 9)", -signal.SIGKILL, 3), ("os._exit(3)", 3, 3), ("sys.exit(5)", 5, 4)],
    ids=["SIGKILL", "os._exit", "exit"],
)
def test_what_a_dead_process_leaves_is_complete_and_kept(
    tmp_path: Path, end: str, code: int, elfs: int
) -> None:
    """Everything up to the start of the last ELF is on disk when it starts; an orderly end writes all."""
    text = CHILD.format(folder=str(Path(__file__).parent), tmp=str(tmp_path), end=end)
    assert subprocess.run([sys.executable, "-c", text], check=False, timeout=60).returncode == code
    if code == 5:
        found = load(tmp_path / "trace.json")
    else:
        (part,) = tmp_path.glob("trace.json.*.part")
        left = load(part)
        (kept,) = keep_unfinished(tmp_path / "trace.json")
        assert kept.name == "trace.unfinished-1.json"
        found = load(kept)
        assert found == left
    check_schema(found)
    assert len(slices(found, "elf")) == elfs


def test_files_of_living_processes_and_strangers_are_left_alone(tmp_path: Path) -> None:
    alive = tmp_path / f"trace.json.{os.getpid()}.part"
    stranger, dead = tmp_path / "trace.json.x.part", tmp_path / "trace.gw0.json.999999999.part"
    taken = tmp_path / "trace.gw0.unfinished-1.json"
    for path in (alive, stranger, dead, taken):
        path.write_text("{}")
    assert [p.name for p in keep_unfinished(tmp_path / "trace.json")] == ["trace.gw0.unfinished-2.json"]
    assert alive.exists()
    assert stranger.exists()
    assert not dead.exists()


def test_a_full_disk_does_not_end_the_run(cache: KernelCache, tmp_path: Path) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    def run(error: type[Exception] | None = None) -> None:
        with Timeline(tmp_path / "trace.json"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            work(cache)
            timeline.flush()
            if error is not None:
                raise error

    with pytest.raises(TimelineError, match=r"trace\.json is incomplete: .*No space left"):
        run()
    load(tmp_path / "trace.json")
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TimelineError, match=r"file/trace\.json cannot be written"):
        Timeline(tmp_path / "file" / "trace.json").__enter__()
    assert timeline.recorders == ()
