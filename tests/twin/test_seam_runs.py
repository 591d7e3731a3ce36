"""Runs and runlists: states, time-outs, restart rules, the clock, hangs, and what is dropped in flight."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from npu_twin import clock, executor, injection, pyxrt, timing, trace
from npu_twin._xrt import run as run_module
from npu_twin.exceptions import DeviceHangError

STATE = pyxrt.ert_cmd_state
COMPLETED, NEW = STATE.ERT_CMD_STATE_COMPLETED, STATE.ERT_CMD_STATE_NEW
TIMEOUT, ERROR = STATE.ERT_CMD_STATE_TIMEOUT, STATE.ERT_CMD_STATE_ERROR


@pytest.fixture
def run(bench: Any, adder: Callable[..., Any]) -> Any:
    ones = bench.bf16(np.ones(1024))
    return bench.run(adder(), a=ones, b=ones)


@pytest.fixture
def stuck() -> Iterator[list[Any]]:
    """Runs that can never be waited for: kept, and marked harmless at the end, as no driver call can."""
    held: list[Any] = []
    yield held
    for one in held:
        one._in_flight = False


def test_life_of_a_run(run: Any, bench: Any) -> None:
    assert run.state() == NEW
    assert run.start() is None
    assert run.state() == NEW
    state = run.wait()
    assert type(state) is STATE
    assert state == COMPLETED
    assert state is not COMPLETED
    assert run.state() == COMPLETED
    assert run.wait() == run.wait(10) == COMPLETED
    assert run.wait2() is None
    assert (bench.result("out") == 2).all()


def test_restart_rules(run: Any) -> None:
    for _ in range(2):
        run.start()
        with pytest.raises(RuntimeError) as caught:
            run.start()
        assert str(caught.value) == "bad command state, can't launch"
        assert run.wait(1000) == COMPLETED


def test_results_appear_when_the_run_is_seen_complete(run: Any, bench: Any) -> None:
    run.start()
    assert np.isnan(bench.result("out")).all()
    run.wait(1000)
    assert (bench.result("out") == 2).all()


def test_wait_limit_below_the_modelled_time(run: Any, bench: Any) -> None:
    """The limit passes on the virtual clock, the run stays in flight, and a second wait completes it."""
    with injection.delay(2500):
        run.start()
    before = bench.npu.clock.now_us()
    assert run.wait(1) == TIMEOUT
    assert bench.npu.clock.now_us() == pytest.approx(before + 1000)
    assert run.state() == NEW
    assert np.isnan(bench.result("out")).all()
    with pytest.raises(RuntimeError, match="bad command state, can't launch"):
        run.start()
    assert run.wait(1) == TIMEOUT
    assert run.wait(1) == COMPLETED
    assert run.state() == COMPLETED
    assert (bench.result("out") == 2).all()
    run.start()
    assert run.wait(1000) == COMPLETED


@pytest.mark.parametrize("name", ["ERROR", "ABORT", "TIMEOUT", "NORESPONSE", "SKERROR", "SKCRASHED"])
def test_device_side_failure_shows_in_both_and_computes_nothing(name: str, run: Any, bench: Any) -> None:
    with injection.force_state(name, times=1) as fault:
        run.start()
        assert run.wait(1000).name == f"ERT_CMD_STATE_{name}"
        assert run.state().name == f"ERT_CMD_STATE_{name}"
        with pytest.raises(RuntimeError) as caught:
            run.wait2()
        text, _, details = str(caught.value).partition("\n")
        assert text == f"Command failed to complete successfully (ERT_CMD_STATE_{name})"
        assert details.startswith("txn_op_idx = 0x") == (name == "TIMEOUT")
        assert fault.hits == 1
        assert np.isnan(bench.result("out")).all()
        run.start()
        assert run.wait(1000) == COMPLETED
    assert (bench.result("out") == 2).all()


def test_a_hang_times_out_on_the_virtual_clock(run: Any, bench: Any, stuck: list[Any]) -> None:
    stuck.append(run)
    with injection.never_complete():
        run.start()
    before = bench.npu.clock.now_us()
    assert run.wait(250) == TIMEOUT
    assert bench.npu.clock.now_us() == pytest.approx(before + 250e3)
    assert run.state() == NEW
    for wait in (run.wait, run.wait2, lambda: run.wait(0)):
        with pytest.raises(DeviceHangError, match="never completes"):
            wait()
    assert bench.npu.clock.now_us() == pytest.approx(before + 250e3)


def test_a_hung_context_stays_hung_and_others_go_on(
    run: Any, bench: Any, stuck: list[Any], adder: Callable[..., Any]
) -> None:
    again = pyxrt.run(
        pyxrt.ext.kernel(pyxrt.hw_context(bench.device, pyxrt.elf(bench.path(adder()))), "adder")
    )
    for index, name in enumerate(("a", "b", "out")):
        again.set_arg(index, bench.bos[name])
    stuck.append(run)
    with injection.never_complete():
        run.start()
    again.start()
    assert again.wait(1000) == COMPLETED


def test_a_hang_is_per_kernel_and_counted(bench: Any, adder: Callable[..., Any], stuck: list[Any]) -> None:
    one, two = bench.run(adder("one")), bench.run(adder("two"))
    with injection.never_complete(kernel="two", skip=1, times=1) as fault:
        for _ in range(2):
            one.start()
            assert one.wait(1000) == COMPLETED
        two.start()
        assert two.wait(1000) == COMPLETED
        two.start()
        assert two.wait(1000) == TIMEOUT
        stuck.append(two)
    assert fault.hits == 1


def test_dropping_a_run_in_flight_is_reported(
    bench: Any, adder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench.run(adder())
    run.start()
    before = run_module.aborts
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    del run
    gc.collect()
    assert run_module.aborts == before + 1
    [problem] = seen
    assert "xrt::run destructed while command is still in progress" in str(problem.exc_value)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda run, bench: run.set_arg(1, 5), "argument 1 (b) is not a buffer"),
        (
            lambda run, bench: run.set_arg(1, pyxrt.bo(bench.bos["b"], 2046, 0)),
            "argument 1 (b) needs 2048 bytes, its buffer has 2046",
        ),
    ],
)
def test_bad_arguments_end_in_error(
    spoil: Callable[[Any, Any], None],
    reason: str,
    run: Any,
    bench: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoil(run, bench)
    with caplog.at_level(logging.WARNING, logger="npu_twin.device"):
        run.start()
    assert reason in caplog.text
    assert run.wait(10) == ERROR
    assert run.state() == ERROR
    assert np.isnan(bench.result("out")).all()
    run.set_arg(1, bench.bos["b"])
    run.start()
    assert run.wait(1000) == COMPLETED


def test_unset_arguments_end_in_error(bench: Any, adder: Callable[..., Any]) -> None:
    run = pyxrt.run(bench.kernel(adder()))
    run.start()
    assert run.wait(10) == ERROR


def test_a_run_does_not_keep_its_buffers(run: Any, bench: Any) -> None:
    run.start()
    run.wait(1000)
    bench.bos.clear()
    bench.kept.clear()
    gc.collect()
    with pytest.raises(RuntimeError) as caught:
        run.start()
    assert str(caught.value) == "DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed (err=-22): Invalid argument"


def test_a_run_keeps_kernel_and_context(bench: Any, adder: Callable[..., Any]) -> None:
    run = bench.run(adder())
    gc.collect()
    assert bench.npu.contexts == 1
    run.start()
    assert run.wait(1000) == COMPLETED
    del run
    gc.collect()
    assert bench.npu.contexts == 0


def test_calling_a_kernel(bench: Any, adder: Callable[..., Any]) -> None:
    kernel = bench.kernel(adder())
    buffers = [pyxrt.ext.bo(bench.device, 2048) for _ in range(3)]
    run = kernel(*buffers)
    assert type(run) is pyxrt.run
    assert run.wait(1000) == COMPLETED
    assert kernel(*buffers, buffers[0], 5, "x").wait(1000) == COMPLETED
    assert kernel(buffers[0], 1.5, 1 << 40, None).wait(1000) == ERROR
    assert kernel().wait(1000) == ERROR


def test_rebinding_an_argument(run: Any, bench: Any) -> None:
    run.start()
    run.wait(1000)
    other = pyxrt.ext.bo(bench.device, 2048)
    other.write(bench.bf16(np.full(1024, 3)), 0)
    other.sync(bench.to_device)
    run.set_arg(1, other)
    run.start()
    run.wait(1000)
    assert (bench.result("out") == 4).all()


# --- time -------------------------------------------------------------------------------------------


def test_a_run_takes_dispatch_and_modelled_time(bench: Any, adder: Callable[..., Any]) -> None:
    listing = adder()
    run = bench.run(listing)
    clock_us = bench.npu.clock.now_us
    run.start()
    assert clock_us() == pytest.approx(timing.dispatch_us())
    run.wait(1000)
    once = timing.dispatch_us() + timing.run_us(listing).total_us
    assert clock_us() == pytest.approx(once)
    run.start()
    bench.npu.clock.advance_us(1e4)
    after = clock_us()
    run.wait(1000)
    assert clock_us() == after, "host work and the run overlap"


def test_wake_up_after_idle(bench: Any, adder: Callable[..., Any]) -> None:
    run = bench.run(adder())

    def once() -> float:
        before = bench.npu.clock.now_us()
        run.start()
        run.wait(5000)
        return float(bench.npu.clock.now_us() - before)

    base = once()
    bench.npu.clock.advance_us(5e6)
    assert once() == pytest.approx(base)
    bench.npu.clock.advance_us(11e6)
    assert once() == pytest.approx(base + timing.wake_us(11.0))
    assert timing.wake_us(11.0) > 1e5


def test_context_switch_costs(bench: Any, adder: Callable[..., Any]) -> None:
    one, two = bench.run(adder("one")), bench.run(adder("two"))

    def cost(*runs: Any) -> float:
        before = bench.npu.clock.now_us()
        for run in runs:
            run.start()
            run.wait(1000)
        return float(bench.npu.clock.now_us() - before)

    cost(one)
    same = cost(one, one)
    assert cost(one, two, one) - cost(one) == pytest.approx(same + 2 * timing.context_switch_us())


def test_the_queue_keeps_the_order_of_submission(bench: Any, adder: Callable[..., Any]) -> None:
    """Waiting for the second run completes the first one, too, on the device and on the clock."""
    ones = bench.bf16(np.ones(1024))
    first = bench.run(adder("first"), a=ones, b=ones)
    out = bench.bos["out"]
    second = bench.run(adder("second"), b=ones)
    second.set_arg(0, out)
    first.start()
    second.start()
    assert second.wait(1000) == COMPLETED
    assert (bench.result("out") == 3).all()
    before = bench.npu.clock.now_us()
    assert first.wait(1000) == COMPLETED
    assert bench.npu.clock.now_us() == before


def test_timing_only_leaves_outputs_poisoned(run: Any, bench: Any) -> None:
    with clock.timing_only():
        run.start()
        assert run.wait(1000) == COMPLETED
    assert bench.npu.clock.now_us() > 0
    assert np.isnan(bench.result("out")).all()


def test_trace_of_launches(bench: Any, chain: Any) -> None:
    run = bench.run(chain)
    with trace.observe() as events:
        run.start()
        run.wait(1000)
    run.start()
    run.wait(1000)
    [whole] = [e for e in events if e.kind == "run"]
    launches = [e for e in events if e.kind == "launch"]
    assert [(e.program, e.launch, e.op) for e in launches] == [
        ("chain", "first", "eltwise_add"),
        ("chain", "swiglu", "silu_mul"),
        ("chain", "last", "eltwise_add"),
    ]
    expected = timing.run_us(chain)
    assert [e.duration_s * 1e6 for e in launches] == pytest.approx([us for _, us in expected.launches])
    assert whole.duration_s * 1e6 == pytest.approx(expected.total_us)
    assert launches[-1].start_s + launches[-1].duration_s == pytest.approx(whole.start_s + whole.duration_s)


def test_clock_refuses_to_run_backwards() -> None:
    ticking = clock.VirtualClock()
    for step in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cannot advance"):
            ticking.advance_us(step)
    assert ticking.advance_us(1500) == 1500
    assert ticking.advance_to_us(1000) == 1500
    assert ticking.now() == pytest.approx(1.5e-3)
    assert "modelled" in repr(ticking)


# --- runlists ---------------------------------------------------------------------------------------


@pytest.fixture
def members(bench: Any, adder: Callable[..., Any]) -> tuple[Any, list[Any]]:
    ones = bench.bf16(np.ones(1024))
    context = pyxrt.hw_context(bench.device, pyxrt.elf(bench.path(adder())))
    kernel = pyxrt.ext.kernel(context, "adder")
    bench.run(adder(), a=ones, b=ones)
    runs = [pyxrt.run(kernel) for _ in range(2)]
    for run in runs:
        for index, name in enumerate(("a", "b", "out")):
            run.set_arg(index, bench.bos[name])
    listed = pyxrt.runlist(context)
    for run in runs:
        assert listed.add(run) is None
    return listed, runs


def test_runlist(members: tuple[Any, list[Any]], bench: Any) -> None:
    listed, runs = members
    for _ in range(2):
        assert listed.execute() is None
        busy = "current state: running: Invalid argument"
        with pytest.raises(RuntimeError) as caught:
            listed.execute()
        assert str(caught.value) == f"runlist must be idle before submitting for execution, {busy}"
        with pytest.raises(RuntimeError) as caught:
            listed.add(runs[0])
        assert str(caught.value) == f"runlist must be idle before adding run objects, {busy}"
        assert listed.wait() is None
        assert listed.wait() is None
    assert [run.state() for run in runs] == [NEW, NEW]
    assert (bench.result("out") == 2).all()


def test_empty_runlist(bench: Any, adder: Callable[..., Any]) -> None:
    context = pyxrt.hw_context(bench.device, pyxrt.elf(bench.path(adder())))
    listed = pyxrt.runlist(context)
    assert listed.execute() is None
    assert listed.wait() is None


def test_failing_runlist(members: tuple[Any, list[Any]]) -> None:
    listed, _ = members
    with injection.force_state("ERROR", skip=1):
        listed.execute()
        with pytest.raises(RuntimeError) as caught:
            listed.wait()
    assert str(caught.value) == "runlist failed execution (ERT_CMD_STATE_ERROR)"
    listed.execute()
    listed.wait()


def test_hanging_runlist(members: tuple[Any, list[Any]]) -> None:
    listed, _ = members
    with injection.never_complete():
        listed.execute()
    with pytest.raises(DeviceHangError):
        listed.wait()
    listed._jobs = []


def test_nothing_is_planted_by_default() -> None:
    assert injection.active == ()
    assert trace.sinks == ()
    assert int(COMPLETED) == executor.COMPLETED
    with pytest.raises(ValueError, match="'DONE' is not one of COMPLETED, ERROR"):
        injection.force_state("DONE")
