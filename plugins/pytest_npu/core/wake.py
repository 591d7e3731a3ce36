"""Taking part in a run: the state of the process is made here, and one plugin object per concern.

Only hooks of `pytest_npu.plugin` come here: early when an option of ours is given, else when the first test
of ours is met. Order counts where two objects implement one hook: who is registered later is called earlier.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pytest_npu.bridges import xdist as xdist_bridge
from pytest_npu.bridges.benchmark import BenchmarkHooks
from pytest_npu.core.collection import CollectionHooks
from pytest_npu.core.constants import COLLECTION, NPU2, QUESTIONS
from pytest_npu.core.defaults import DefaultHooks
from pytest_npu.core.events import Event, Sink
from pytest_npu.core.options import NpuOptions
from pytest_npu.core.phase_gate import PhaseGate, PhaseGateHooks
from pytest_npu.core.state import STATE, NpuState, Role
from pytest_npu.core.testlog import TestLogHooks
from pytest_npu.core.threads import cap_threads, let_threads_sleep
from pytest_npu.device import supervised
from pytest_npu.device.child import ChildHooks
from pytest_npu.device.driver import DeviceHolder
from pytest_npu.ledger.feature import LedgerHooks
from pytest_npu.report.feature import ReportHooks
from pytest_npu.report.runlogs import RunLogs


class _NoSink:
    """For runs that execute nothing, and for xdist workers of a controller without the plugin."""

    def emit(self, event: Event) -> None:
        """Drop the event."""


def wake(config: pytest.Config) -> CollectionHooks:
    """Take part in this run. Raises pytest.UsageError for options that make no sense, or a missing NPU."""
    options = NpuOptions.from_config(config)
    # gates of every model folder use it, and few repositories around them know it
    config.addinivalue_line("markers", "slow: takes more than about 20 s")
    role = xdist_bridge.role_of(config)
    gate = PhaseGate(options.phase_order)
    link = supervised.claim_link()
    control = link.control if link is not None else None
    only_asks = any(config.getoption(name, None) for name in QUESTIONS)
    logs: RunLogs | None = None
    sink: Sink = _NoSink()
    if role is Role.WORKER:
        settings = xdist_bridge.worker_settings(config)
        control = Path(settings["control"]) if settings.get("control") else None
        gate.restore(settings.get("failed_phases", {}))
        if "workers_here" in settings:
            cap_threads((os.cpu_count() or 1) // int(settings["workers_here"]))
        sink = xdist_bridge.worker_sink(config, gate) or sink
    elif link is not None:
        sink = link
    elif not only_asks:
        sink = logs = RunLogs(options.report_dir, options.run_id)
    past = supervised.load_past(control)
    gate.restore(past.failed_phases)
    state = config.stash[STATE] = NpuState(
        config,
        options,
        role,
        sink,
        DeviceHolder(config, options.device, control),
        run_id=options.run_id or (logs.run_id if logs is not None else ""),
        worker_id=xdist_bridge.worker_id(config),
        control=control,
        replayed=past.reports,
    )
    if role is not Role.CONTROLLER or state.is_expected():
        let_threads_sleep(config)
    ledger = LedgerHooks(state)
    collection = CollectionHooks(state, ledger)
    concerns: list[tuple[str, Any]] = [
        ("npu-defaults", DefaultHooks(options)),
        ("npu-ledger", ledger),
        (COLLECTION, collection),
    ]
    if control is not None:
        stacks = supervised.prepare_for_the_worst(control)
        child = ChildHooks(state, past, stacks, collection.hang_limits)
        concerns.append(("npu-child", child))
    concerns += [
        ("npu-phases", PhaseGateHooks(state, gate)),
        ("npu-reports", ReportHooks(state, logs)),
        ("npu-measurements", BenchmarkHooks(state)),
        ("npu-testlog", TestLogHooks(state, collection.hang_limits)),
    ]
    if role is Role.CONTROLLER:
        concerns.append(("npu-xdist", xdist_bridge.XdistHooks(state, gate)))
    for name, concern in concerns:
        config.pluginmanager.register(concern, name)
    _register_features(state)
    if not only_asks:
        _require_device(state)
    return collection


def _register_features(state: NpuState) -> None:
    """What an option switches on; nothing else of `features` and `bridges` is imported."""
    config, options = state.config, state.options
    if options.npu:
        from pytest_npu.device.silicon import SiliconHooks

        config.pluginmanager.register(SiliconHooks(state), "npu-silicon")
    if options.adopt:
        from pytest_npu.features import adopt

        adopt.configure(state)
    if options.fault is not None:
        from pytest_npu.features import fault

        fault.configure(config, options, options.fault)
    if options.bisect:
        from pytest_npu.features import bisect

        bisect.configure(state)
    if options.trace is not None:
        from pytest_npu.features import trace

        trace.register(state, options.trace)
    if config.getoption("htmlpath", None) and state.is_expected():
        from pytest_npu.bridges import html

        html.register(state)


def _require_device(state: NpuState) -> None:
    """With `--npu`: end the run with exit code 4 when this process cannot use an NPU."""
    if state.device.name != NPU2 or state.device.poisoned() is not None:
        return
    if state.role is Role.CONTROLLER and xdist_bridge.has_other_hosts(state.config):
        return  # workers on other hosts have NPUs of their own, and ask for them there
    state.device.require()
