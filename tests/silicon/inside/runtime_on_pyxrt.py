"""Our host runtime on the real pyxrt and its NPU user driver; `make conformance` runs it in the sandbox."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import bench
import numpy as np
import pytest

from llms.llama_kernel_builder.exceptions import (
    ArtefactRefused,
    BadArgument,
    ContextRefused,
    DeviceMemoryError,
    DevicePoisoned,
    KernelRunError,
)

FLOWS = {"elf": bench.ELF, "xclbin": bench.XCLBIN}


def open_at_most(log: Path) -> tuple[int, int]:
    """Largest number of contexts open at once, and how many are open at the end."""
    now = most = 0
    for line in log.read_text().splitlines():
        now += {"context": 1, "close": -1}.get(line.split()[0], 0)
        most = max(most, now)
    return most, now


@pytest.mark.parametrize("flow", FLOWS)
def test_runs_and_returns_copies(flow: str, tmp_path: Path) -> None:
    cache = bench.cache(tmp_path, "add", entry=FLOWS[flow])
    out = cache.load_and_run("add", bench.vector(1), bench.vector(2), None)[2]
    again = cache.load_and_run("add", bench.vector(5), None, None)[2]
    assert out.shape == (bench.N,)
    assert not np.shares_memory(out, again)
    cache.close()
    del cache
    gc.collect()
    assert float(out.astype(np.float32).sum()) == 0.0  # nothing is computed, and the memory is still ours


@pytest.mark.parametrize("flow", FLOWS)
def test_contexts_are_closed_in_time(flow: str, tmp_path: Path, ioctl_log: Path) -> None:
    names = [f"add{i}" for i in range(12)]
    cache = bench.cache(tmp_path, *names, entry=FLOWS[flow])
    for _ in range(2):
        for name in names:
            cache.load_and_run(name, bench.vector(1), bench.vector(2), None)
    most, still = open_at_most(ioctl_log)
    assert (most, still) == (cache.runtime.max_contexts, cache.runtime.max_contexts)
    cache.close()
    assert open_at_most(ioctl_log)[1] == 0


def test_one_context_for_many_calls(tmp_path: Path, ioctl_log: Path) -> None:
    cache = bench.cache(tmp_path, "add")
    for layer in range(4):
        for _ in range(3):
            cache.load_and_run("add", bench.vector(1), bench.vector(layer), None, bo_key=f"add_L{layer}")
    lines = [line.split()[0] for line in ioctl_log.read_text().splitlines()]
    assert (lines.count("context"), lines.count("command")) == (1, 12)
    cache.close()


def test_a_driver_that_allows_fewer_contexts(
    tmp_path: Path, ioctl_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FX_MAX_CONTEXTS", "3")
    names = [f"add{i}" for i in range(5)]
    cache = bench.cache(tmp_path, *names)
    for name in [*names, *names]:
        cache.load_and_run(name, bench.vector(1), bench.vector(2), None)
    assert cache.runtime.open_contexts == 3
    cache.close()
    assert open_at_most(ioctl_log) == (3, 0)


def test_no_context_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX_FAIL", "40:16")
    cache = bench.cache(tmp_path, "add")
    with pytest.raises(ContextRefused, match=r"program 'add'.*Device or resource busy.*another process"):
        cache.load_and_run("add", bench.vector(1), bench.vector(2), None)


def test_buffers_are_reused(tmp_path: Path, ioctl_log: Path) -> None:
    """A new key brings its three arguments and what the driver needs for a run, a known one nothing."""
    cache = bench.cache(tmp_path, "add")

    def made_by(key: str) -> int:
        before = ioctl_log.read_text().count("buffer ")
        cache.load_and_run("add", bench.vector(1), bench.vector(2), None, bo_key=key)
        return ioctl_log.read_text().count("buffer ") - before

    made_by("first")  # opens the context, too
    second, third = made_by("second"), made_by("third")
    assert second == third >= 3
    assert [made_by(key) for key in ("first", "second", "third", "first")] == [0, 0, 0, 0]
    cache.close()


STATES = {
    5: ("ERT_CMD_STATE_ERROR", "device reported an error"),
    6: ("ERT_CMD_STATE_ABORT", "context was lost"),
    8: ("ERT_CMD_STATE_TIMEOUT", "did not finish in time"),
    9: ("ERT_CMD_STATE_NORESPONSE", "reload the amdxdna driver"),
    10: ("ERT_CMD_STATE_SKERROR", "driver and firmware"),
    11: ("ERT_CMD_STATE_SKCRASHED", "firmware crashed"),
}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("state", STATES)
def test_every_other_state_is_an_error(
    state: int, flow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = bench.cache(tmp_path, "add", entry=FLOWS[flow])
    monkeypatch.setenv("FX_STATE", str(state))
    name, cause = STATES[state]
    with pytest.raises(KernelRunError, match=rf"kernel 'add' ended in {name} after [\d.]+ ms: .*{cause}"):
        cache.load_and_run("add", bench.vector(1), bench.vector(2), None)
    monkeypatch.delenv("FX_STATE")
    with pytest.raises(DevicePoisoned, match="unusable since kernel 'add'"):
        cache.load_and_run("add", bench.vector(1), None, None)
    cache.close()


REFUSALS = {
    "46:22": (KernelRunError, r"ended in SUBMISSION REFUSED .*EXEC_CMD IOCTL failed \(err=-22\)"),
    "43:12": (DeviceMemoryError, r"2048 bytes cannot be allocated.*Cannot allocate memory.*memlock"),
}


@pytest.mark.parametrize("fail", REFUSALS)
def test_refused_calls_are_named(fail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = bench.cache(tmp_path, "add")
    _ = cache.runtime
    monkeypatch.setenv("FX_FAIL", fail)
    error, text = REFUSALS[fail]
    with pytest.raises(error, match=text):
        cache.load_and_run("add", bench.vector(1), bench.vector(2), None)


def test_a_slow_command_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX_DELAY_MS", "300")
    cache = bench.cache(tmp_path, "add")
    begin = cache.driver.clock.now()
    cache.load_and_run("add", bench.vector(1), bench.vector(2), None)
    assert cache.driver.clock.now() - begin >= 0.3
    cache.close()


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((bench.N, 2), bench.bfloat16)[:, 0], "not C-contiguous"),
        (np.zeros(bench.N), "dtype float64"),
    ],
)
def test_what_pyxrt_would_copy_wrongly_is_refused(array: np.ndarray, text: str, tmp_path: Path) -> None:
    cache = bench.cache(tmp_path, "add")
    with pytest.raises(BadArgument, match=text):
        cache.load_and_run("add", array, bench.vector(2), None)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"file": "full.elf", "kernel": "main:add"}, "no ELF found with given kernel name"),
        ({"file": "txn.bin", "kernel": "DPU:main"}, "not a valid ELF file"),
        ({"file": "scalar.elf", "kernel": "DPU:main"}, "scalar args are not yet supported"),
        ({**bench.XCLBIN, "kernel": "OTHER"}, "No such kernel 'OTHER'"),
        ({**bench.XCLBIN, "file": "full.elf"}, "buffer too small|Invalid xclbin"),
    ],
)
def test_artefacts_the_driver_refuses(entry: dict[str, str], text: str, tmp_path: Path) -> None:
    cache = bench.cache(tmp_path, "add", entry=entry)
    with pytest.raises(ArtefactRefused, match=rf"program 'add': the driver refuses .*{text}"):
        cache.load_and_run("add", bench.vector(1), bench.vector(2), None)


SCRIPT = """
import gc, os, pathlib, signal, sys, tempfile
sys.path.insert(0, {folder!r})
import bench
from llms.llama_kernel_builder.exceptions import KernelRunError
cache = bench.cache(pathlib.Path(tempfile.mkdtemp()), "add")
cache.load_and_run("add", bench.vector(1), bench.vector(2), None)
{body}
try:
    cache.load_and_run("add", bench.vector(1), None, None)
except BaseException as error:
    print(type(error).__name__, error)
os.environ.pop("FX_DELAY_MS", None)
cache.close()
del cache
gc.collect()
print("still here")
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            'os.environ["FX_DELAY_MS"] = "-1"',
            "ms: no end within the wait limit of 200 ms and still running",
        ),
        (
            'os.environ["FX_DELAY_MS"] = "100"\n'
            "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.05)",
            "KeyboardInterrupt",
        ),
        ('os.environ["FX_DELAY_MS"] = "100"; os.environ["FX_FAIL"] = "49:5"', "ended in WAIT REFUSED"),
        ('os.environ["FX_FAIL"] = "46:5"', "ended in SUBMISSION REFUSED"),
    ],
)
def test_nothing_aborts_the_process(body: str, expected: str) -> None:
    """A run whose end nobody saw outlives the cache, the interpreter's end included."""
    script = SCRIPT.format(folder=str(Path(__file__).parent), body=body)
    import os

    env = {**os.environ, "NPU_WAIT_LIMIT_MS": "200"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert expected in done.stdout
    assert done.stdout.endswith("still here\n")
    assert "xrt::run destructed" not in done.stderr
