"""pytest-xdist: events of workers travel live to the controller, one model stays on one worker.

Every worker gets an execnet channel of its own with its input. What was sent before a worker died has been
received, so the events of a killed worker are complete up to the kill, on this host or on another.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from typing import TYPE_CHECKING, Any

import pytest

from pytest_npu.core.constants import EXPECTED_KEY, NPU2
from pytest_npu.core.events import Event
from pytest_npu.core.models import model_name
from pytest_npu.core.state import NpuState, Role
from pytest_npu.device.preflight.feature import run_preflight
from pytest_npu.device.supervised import why_ended

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

    from pytest_npu.core.phase_gate import PhaseGate

CHANNEL_KEY = "npu_channel"
SETTINGS_KEY = "npu_settings"


class ChannelSink:
    """Sends the events of a worker to the controller."""

    def __init__(self, channel: Any, worker_id: str) -> None:
        self._channel = channel
        self._worker_id = worker_id

    def emit(self, event: Event) -> None:
        """Send one event; a controller that is gone cannot be told anything."""
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps({**event, "worker": self._worker_id}, default=str))


def worker_sink(config: pytest.Config, gate: PhaseGate) -> ChannelSink | None:
    """The sink of a worker whose controller runs this plugin, else None.

    The controller sends back which phases failed when a test took another worker down.
    """
    workerinput = _workerinput(config)
    if CHANNEL_KEY not in workerinput:
        return None
    channel = workerinput[CHANNEL_KEY]
    channel.setcallback(lambda text: gate.restore(json.loads(text)))
    return ChannelSink(channel, str(workerinput["workerid"]))


def worker_settings(config: pytest.Config) -> dict[str, Any]:
    """What the controller tells its workers: how many share a host, and phases that failed before."""
    settings: dict[str, Any] = json.loads(_workerinput(config).get(SETTINGS_KEY, "{}"))
    return settings


def _workerinput(config: pytest.Config) -> dict[str, Any]:
    return getattr(config, "workerinput", None) or {}


def worker_id(config: pytest.Config) -> str:
    """`gw0` in a worker of pytest-xdist, else empty."""
    return str(_workerinput(config).get("workerid", ""))


def introduce_worker(state: NpuState) -> None:
    """Tell the controller where this worker is; on another host, after the checks of that host."""
    host = platform.node()
    state.emit("worker", worker=state.worker_id, host=host, pid=os.getpid())
    if host != worker_settings(state.config).get("host", host):
        facts = run_preflight(state.config, state.device)
        state.emit("preflight", facts=[{**fact, "name": f"{host}: {fact['name']}"} for fact in facts])


def _workers_on_host(config: pytest.Config, spec: Any) -> int:
    """How many workers of this run share a host with the gateway of `spec`; they share its cores."""
    return max(1, sum(_host_of(other) == _host_of(spec) for other in _specs(config)))


def has_other_hosts(config: pytest.Config) -> bool:
    """True when a worker of this run is on another host."""
    return any(_host_of(spec) for spec in _specs(config))


def _specs(config: pytest.Config) -> list[Any]:
    from execnet import XSpec
    from xdist.workermanage import parse_tx_spec_config

    return [XSpec(text) for text in parse_tx_spec_config(config)]


def _host_of(spec: Any) -> str:
    return str(spec.ssh or spec.vagrant_ssh or spec.socket or "")


class XdistHooks:
    """Registered on the controller when pytest-xdist distributes tests."""

    def __init__(self, state: NpuState, gate: PhaseGate) -> None:
        self._state = state
        self._gate = gate
        self._ours = state.is_expected()
        self._channels: list[Any] = []

    def pytest_configure_node(self, node: WorkerController) -> None:
        """Give the worker a channel for its events; `pytest_configure_node` of pytest-xdist."""
        state = self._state
        channel = node.gateway.newchannel()
        channel.setcallback(lambda text: state.receive(json.loads(text)))
        settings: dict[str, Any] = {"failed_phases": self._gate.export(), "host": platform.node()}
        if state.control is not None:
            settings["control"] = str(state.control)
        node.workerinput[EXPECTED_KEY] = self._ours
        if self._ours:
            settings["workers_here"] = _workers_on_host(state.config, node.gateway.spec)
        self._channels.append(channel)
        node.workerinput[CHANNEL_KEY] = channel
        node.workerinput[SETTINGS_KEY] = json.dumps(settings)

    def _note_death(self, nodeid: str) -> None:
        """A test took its worker down: no other worker may run later phases of that model either."""
        info = self._state.tests.get(nodeid)
        if info is None:
            return
        self._gate.note_failure(info.model, info.phase, nodeid)
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send(json.dumps(self._gate.export()))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController, error: object) -> None:
        """End a run that a worker refused, instead of starting that worker again and again.

        A host without a usable NPU is the usual reason; `pytest_testnodedown` of pytest-xdist.
        """
        _, refusal, reason = str(error or "").rpartition("UsageError: ")
        if refusal and self._ours:
            raise pytest.UsageError(f"worker {node.gateway.id}: {reason.strip()}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """One model per worker, when the user chose no distribution himself."""
        if not self._ours or config.getoption("dist") != "load":
            return None
        from xdist.scheduler import LoadScopeScheduling

        from pytest_npu.core.work_order import LongestFirst, known_durations

        state, hooks = self._state, self

        class ModelScheduling(LoadScopeScheduling):  # type: ignore[misc]
            """Tests of one model form one unit of work; other tests are units of their own.

            On the twin the modules of one model are units when all its tests belong to one phase: a large
            model would else decide alone how long a run of phase 6 takes.
            """

            def __init__(self, config: pytest.Config, log: Any) -> None:
                super().__init__(config, log)
                self.workqueue = LongestFirst(self._durations)
                self._sharing: dict[str, bool] = {}

            def _durations(self) -> dict[str, float]:
                folders = {state.folders.of_nodeid(nodeid, config.rootpath) for nodeid in self.collection}
                models = {model_name(folder) for folder in folders if folder is not None}
                return known_durations(state.options.report_dir, sorted(models))

            def _split_scope(self, nodeid: str) -> str:
                folder = state.folders.of_nodeid(nodeid, config.rootpath)
                if folder is None:
                    return nodeid
                model = model_name(folder)
                return (
                    f"model {model} {nodeid.partition('::')[0]}" if self._shared(model) else f"model {model}"
                )

            def _shared(self, model: str) -> bool:
                """Whether workers may share a model: no phase waits for another, no device is waited for."""
                if state.device.name == NPU2:
                    return False
                if model not in self._sharing:
                    phases = {info.phase for info in state.tests.values() if info.model == model}
                    self._sharing[model] = len(phases) == 1
                return self._sharing[model]

            def remove_node(self, node: WorkerController) -> str | None:
                """Don't run a test that killed its worker again; xdist 3.8 does, until none is left."""
                units = self.assigned_work[node].values()
                open_tests = [(unit, nodeid) for unit in units for nodeid, done in unit.items() if not done]
                if not open_tests:
                    super().remove_node(node)
                    return None
                unit, crashed = open_tests[0]
                unit[crashed] = True
                hooks._note_death(str(crashed))  # before another worker gets the rest of the unit
                super().remove_node(node)
                return str(crashed)

        return ModelScheduling(config, log)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport, sched: Any) -> None:
        """A worker died while running `crashitem`."""
        info = self._state.tests.get(crashitem)
        cause = why_ended(self._state.control, crashitem)
        report.longrepr = cause or report.longrepr
        if info is not None or cause:
            # An error for the terminal and for JUnit, as in our reports and without xdist. What is not of
            # setup, call or teardown counts as a failure there.
            report.when = "setup"
            report.location = (crashitem.split("::", 1)[0], None, crashitem.partition("::")[2])
        if info is None:
            return
        self._state.emit(
            "crash",
            model=info.model,
            nodeid=crashitem,
            phase=info.phase,
            cause=str(report.longrepr),
            detail="",
        )
        self._note_death(crashitem)


def role_of(config: pytest.Config) -> Role:
    """What this process is; asked in `pytest_configure`, after xdist read its options."""
    if hasattr(config, "workerinput"):
        return Role.WORKER
    if config.getoption("dist", "no") != "no" and config.getoption("tx", None):
        return Role.CONTROLLER
    return Role.MAIN
