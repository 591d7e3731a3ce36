"""What the hooks do: collection, phases, logging, end of the run."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest

from pytest_npu.bridges import (
    benchmark as benchmark_bridge,
)
from pytest_npu.bridges import (
    benchmark_session,
)
from pytest_npu.bridges import (
    rerun as retry,
)
from pytest_npu.bridges import (
    xdist as xdist_bridge,
)
from pytest_npu.bridges.syrupy import keep_snapshots
from pytest_npu.core.constants import DEVICE_LABELS, NPU2, QUESTIONS, REPORT_FIELD, TWIN
from pytest_npu.core.events import Event, Sink, clip
from pytest_npu.core.exceptions import DevicePoisoned
from pytest_npu.core.models import fixture_names, is_ours, is_perf_test, model_name, uses_device
from pytest_npu.core.options import NpuOptions
from pytest_npu.core.phase_gate import PhaseGate
from pytest_npu.core.phases import order_by_phase, phase_label, phase_of
from pytest_npu.core.state import NpuState, Role, TestInfo
from pytest_npu.core.threads import cap_threads
from pytest_npu.device import supervised
from pytest_npu.device.driver import DeviceHolder
from pytest_npu.device.preflight.feature import run_preflight
from pytest_npu.ledger import feature as ledger_bridge
from pytest_npu.report.runlogs import RunLogs

_BLOCKED_BY: pytest.StashKey[str] = pytest.StashKey()


class _NoSink:
    """For runs that execute nothing, and for xdist workers of a controller without the plugin."""

    def emit(self, event: Event) -> None:
        """Drop the event."""


def _only_asks(config: pytest.Config) -> bool:
    return any(config.getoption(name, None) for name in QUESTIONS)


def create_state(config: pytest.Config) -> NpuState:
    """Build the state of this process from its options and role."""
    options = NpuOptions.from_config(config)
    role = xdist_bridge.role_of(config)
    gate = PhaseGate(options.phase_order)
    link = supervised.claim_link()
    control = link.control if link is not None else None
    logs: RunLogs | None = None
    sink: Sink
    worker_id = ""
    if role is Role.WORKER:
        settings = xdist_bridge.worker_settings(config)
        worker_id = str(config.workerinput["workerid"])  # type: ignore[attr-defined]
        control = Path(settings["control"]) if settings.get("control") else None
        gate.restore(settings.get("failed_phases", {}))
        if "workers_here" in settings:
            cap_threads((os.cpu_count() or 1) // int(settings["workers_here"]))
        sink = xdist_bridge.worker_sink(config, gate) or _NoSink()
    elif link is not None:
        sink = link.sink
    elif _only_asks(config):
        sink = _NoSink()
    else:
        sink = logs = RunLogs(options.report_dir, options.run_id)
    device = DeviceHolder(config, options.device, control)
    state = NpuState(config, options, role, sink, logs, device, gate, worker_id=worker_id, control=control)
    if control is not None:
        state.stacks_file = supervised.prepare_for_the_worst(control)
        state.messenger = supervised.Messenger(sink, worker_id)
        state.past = supervised.load_past(control)
        gate.restore(state.past.failed_phases)
    return state


def require_device(state: NpuState) -> None:
    """With `--npu`: end the run with exit code 4 when this process cannot use an NPU."""
    if _only_asks(state.config) or state.device.poisoned() is not None:
        return
    if state.role is Role.CONTROLLER and xdist_bridge.has_other_hosts(state.config):
        return  # workers on other hosts have NPUs of their own, and ask for them there
    state.device.require()


def header_is_known_early(state: NpuState) -> bool:
    """True when the header can be printed before the collection."""
    return state.options.asked or (state.role is Role.CONTROLLER and state.is_expected())


def take_collection(state: NpuState, items: list[pytest.Item]) -> None:
    """Order, deselect and log the collected tests that are ours."""
    for item in items:
        mark = item.get_closest_marker("npu_hang_timeout")
        if mark is not None:
            state.hang_limits[item.nodeid] = _hang_limit(item, mark)
    if state.past.reports:  # what an earlier child did is shown first, so that no fixture is open meanwhile
        items.sort(key=lambda item: item.nodeid not in state.past.reports)
    ours = {item: state.folders.of(item.path) for item in items if is_ours(item, state.folders)}
    if not ours:
        return
    state.activate()
    if state.role is Role.WORKER:
        _introduce_worker(state)
    if state.config.getoption("benchmark_only", False):
        _keep_perf_tests_only(state, items, ours)
    if state.options.phase_order:
        order_by_phase(items, lambda item: str(ours[item]) if ours.get(item) is not None else None)
    by_model: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        if item not in ours:
            continue
        info = TestInfo(
            item.nodeid,
            model_name(ours[item]),
            ours[item],
            phase_of(item),
            is_perf_test(item),
            uses_device(item),
        )
        state.tests[item.nodeid] = info
        if info.device and state.device.name == NPU2:
            retry.allow_retries(item)
        if info.perf:
            benchmark_bridge.use_device_clock(item, state)
        entry = {"nodeid": info.nodeid, "phase": info.phase, "perf": info.perf, "device": info.device}
        by_model.setdefault(info.model, []).append(entry)
    for model, tests in by_model.items():
        mine = [state.tests[test["nodeid"]] for test in tests]
        folder = mine[0].folder
        whole = ledger_bridge.whole_phases(state, folder, mine)
        state.emit("collected", model=model, tests=tests, folder=str(folder or ""), whole=whole)


def _hang_limit(item: pytest.Item, mark: pytest.Mark) -> float:
    seconds = mark.args[0] if mark.args else mark.kwargs.get("seconds")
    if not isinstance(seconds, (int, float)) or seconds < 0:
        raise pytest.UsageError(f"{item.nodeid}: npu_hang_timeout needs a number of seconds, not {seconds!r}")
    return float(seconds)


def _introduce_worker(state: NpuState) -> None:
    """Tell the controller where this is; on another host, after the checks of that host."""
    host = platform.node()
    state.emit("worker", worker=state.worker_id, host=host, pid=os.getpid())
    if host != xdist_bridge.worker_settings(state.config).get("host", host):
        facts = run_preflight(state.config, state.device)
        state.emit("preflight", facts=[{**fact, "name": f"{host}: {fact['name']}"} for fact in facts])


def _keep_perf_tests_only(
    state: NpuState, items: list[pytest.Item], ours: dict[pytest.Item, Path | None]
) -> None:
    """`--benchmark-only` selects; pytest-benchmark itself skips everything else, one by one."""
    others = [item for item in ours if "benchmark" not in fixture_names(item)]
    for item in others:
        del ours[item]
    if others:
        dropped = set(others)
        items[:] = [item for item in items if item not in dropped]
        state.config.hook.pytest_deselected(items=others)


def deselect_perf_tests(state: NpuState, items: list[pytest.Item]) -> None:
    """In a worker of pytest-xdist: take out what measures, with the reason."""
    perf = [item for item in items if is_perf_test(item)]
    dropped = set(perf)
    items[:] = [item for item in items if item not in dropped]
    state.config.hook.pytest_deselected(items=perf)
    by_model: dict[str, list[str]] = {}
    for item in perf:
        by_model.setdefault(model_name(state.folders.of(item.path)), []).append(item.nodeid)
    for model, nodeids in by_model.items():
        state.emit("deselected", model=model, nodeids=nodeids, reason=benchmark_bridge.XDIST_REASON)


def block_or_go_on(state: NpuState, item: pytest.Item) -> None:
    """Skip a test whose model failed in an earlier phase."""
    item.stash[_BLOCKED_BY] = ""
    info = state.tests.get(item.nodeid)
    failure = state.gate.blocker(info.model, info.phase) if info else None
    if info is not None and failure is not None:
        item.stash[_BLOCKED_BY] = failure.nodeid
        pytest.skip(
            f"blocked: {phase_label(failure.phase)} of {info.model} failed ({failure.nodeid}); "
            "--no-phase-order runs it anyway"
        )
    if info is not None and info.device and (cause := state.device.poisoned()) is not None:
        pytest.fail(str(DevicePoisoned(cause)), pytrace=False)


def complete_report(state: NpuState, item: pytest.Item, report: pytest.TestReport) -> None:
    """Add what we know to a test report, and fail a performance test that measured nothing."""
    info = state.tests.get(item.nodeid)
    if info is None:
        return
    if info.perf and report.when == "call":
        benchmark_bridge.require_record(state, item, report)
    extra = {
        "model": info.model,
        "phase": info.phase,
        "device": DEVICE_LABELS[state.device.name],
        "blocked_by": item.stash.get(_BLOCKED_BY, ""),
        "lock_wait_s": state.lock_wait_s,
        "device_s": _device_time(state),
        "worker": state.worker_id,
    }
    setattr(report, REPORT_FIELD, extra)
    state.lock_wait_s = 0.0


def _device_time(state: NpuState) -> float:
    """Modelled device time since the last report of a phase; silicon has no such clock."""
    if state.device.name != TWIN or state.device.opened is None:
        return 0.0
    now = state.device.now()
    spent, state.device_mark = now - state.device_mark, now
    return max(0.0, spent)


def log_start(state: NpuState, nodeid: str) -> None:
    """Log that a test begins."""
    info = state.tests.get(nodeid)
    state.current = info
    if info is not None:
        state.started.add(nodeid)
    if state.role is Role.CONTROLLER or state.replaying:
        return
    limit = state.hang_limits.get(nodeid)
    if state.messenger is not None:
        state.messenger.start(nodeid, limit, info is not None and info.device)
    if info is not None:
        state.emit(
            "test_start",
            model=info.model,
            nodeid=nodeid,
            phase=info.phase,
            worker=state.worker_id,
            hang_limit_s=limit,
        )


def log_report(state: NpuState, report: pytest.TestReport) -> None:
    """Log setup, call or teardown of a test."""
    if state.role is Role.CONTROLLER or state.replaying:
        return
    info = state.tests.get(report.nodeid)
    if info is not None:
        _log_phase(state, info, report)
    if state.messenger is not None:
        state.messenger.report(state.config, report)


def _log_phase(state: NpuState, info: TestInfo, report: pytest.TestReport) -> None:
    if report.failed:
        state.failed.add(report.nodeid)
        state.gate.note_failure(info.model, info.phase, report.nodeid)
    extra: dict[str, Any] = getattr(report, REPORT_FIELD, {})
    if str(report.outcome) == "rerun":  # an outcome of pytest-rerunfailures
        state.attempts[report.nodeid] = attempt = state.attempts.get(report.nodeid, 0) + 1
        state.emit(
            "retry",
            model=info.model,
            nodeid=report.nodeid,
            cause=clip(report.longreprtext, 2000),
            attempt=attempt,
        )
    state.emit(
        "test_phase",
        model=info.model,
        nodeid=report.nodeid,
        phase=info.phase,
        when=report.when,
        outcome=report.outcome,
        duration_s=report.duration,
        longrepr=clip(_reason(report)),
        sections=[(title, clip(body, 20_000)) for title, body in report.sections] if report.failed else [],
        wasxfail=getattr(report, "wasxfail", None),
        blocked_by=extra.get("blocked_by", ""),
        lock_wait_s=extra.get("lock_wait_s", 0.0),
        device_s=extra.get("device_s", 0.0),
        worker=state.worker_id,
    )


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext


def log_finish(state: NpuState, nodeid: str) -> None:
    """Log that a test is over."""
    info = state.tests.get(nodeid)
    state.current = None
    if state.role is Role.CONTROLLER or state.replaying:
        return
    if nodeid in state.failed:
        keep_snapshots(state.config, nodeid)
    if state.messenger is not None and (measured := benchmark_session.measured(state.config, nodeid)):
        state.messenger.benchmark(nodeid, measured)
    if info is not None:
        state.emit("test_finish", model=info.model, nodeid=nodeid, worker=state.worker_id)
    if state.messenger is not None:
        state.messenger.finish(nodeid)


def replay_if_done(state: NpuState, item: pytest.Item) -> bool:
    """Show the result of an earlier child instead of running the test; False when there is none."""
    reports = state.past.reports.get(item.nodeid)
    if reports is None:
        return False
    state.replaying = True
    try:
        supervised.replay(item, reports)
        keep_snapshots(state.config, item.nodeid)
        if item.nodeid in state.past.benchmarks:
            benchmark_session.take_over(state.config, state.past.benchmarks[item.nodeid])
    finally:
        state.replaying = False
    return True


def log_collect_error(state: NpuState, report: pytest.CollectReport) -> None:
    """Log a module below a model folder that cannot be collected."""
    if not report.failed or state.role is Role.CONTROLLER or not report.nodeid:
        return
    folder = state.folders.of_nodeid(report.nodeid, state.config.rootpath)
    if folder is None:
        return
    state.activate()
    state.emit(
        "collect_error",
        model=model_name(folder),
        nodeid=report.nodeid,
        longrepr=clip(str(report.longrepr or "")),
    )


def log_interrupt(state: NpuState, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Log Ctrl-C or `pytest.exit`."""
    if state.role is Role.WORKER or not state.active:
        return
    # pytest and pytest-xdist stop a session by subclasses that carry the reason: -x, errors of the collection
    by_user = excinfo.type is KeyboardInterrupt or not str(excinfo.value)
    reason = "interrupted by the user (Ctrl-C)" if by_user else str(excinfo.value)
    state.emit("interrupt", reason=reason, nodeid=state.current.nodeid if state.current else None)


def log_internal_error(state: NpuState, text: str) -> None:
    """Log an internal error of pytest or of a plugin."""
    if state.active and state.role is not Role.WORKER:
        state.emit("crash", nodeid=None, cause="internal error of pytest or a plugin", detail=clip(text))


def rescue(state: NpuState) -> None:
    """Write the reports of a session that did not come to its end, for example after a second Ctrl-C."""
    if not state.active or state.finished or state.logs is None:
        return
    state.emit("interrupt", reason="the session was cut short", nodeid=None)
    _write(state)
    _tell_paths(state)


def _write(state: NpuState) -> None:
    from pytest_npu.report.write import write_reports

    state.finished = True
    if state.logs is not None:
        state.written = write_reports(state.logs)


def _tell_paths(state: NpuState) -> None:
    from pytest_npu.core import terminal

    for written in state.written:
        state.tell_user("\n".join(terminal.path_lines(written)))


def finish(state: NpuState, session: pytest.Session, exit_status: int) -> None:
    """Log the end and write the reports."""
    if state.role is Role.WORKER:
        return
    for nodeid, text in benchmark_session.regressions(state.config):
        info = state.tests.get(nodeid)
        if info is not None:
            state.emit("regression", model=info.model, nodeid=nodeid, phase=info.phase, reason=text)
        if exit_status == pytest.ExitCode.OK:
            exit_status = session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if state.messenger is not None:
        state.messenger.session_finish()
    if not state.active:
        return
    state.emit("session_finish", exit_status=int(exit_status))
    _write(state)
    if state.logs is not None:
        if exit_status == pytest.ExitCode.INTERNAL_ERROR:  # pytest prints no summary then
            _tell_paths(state)
        state.config.hook.pytest_npu_reports(config=state.config, folders=state.logs.folders)
