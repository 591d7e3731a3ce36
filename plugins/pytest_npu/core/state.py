"""The plugin's state of one pytest process, kept in `config.stash`."""

from __future__ import annotations

import enum
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from pytest_npu.core.constants import FAULT_PLANTED
from pytest_npu.core.events import Event, Sink, make_event
from pytest_npu.core.models import ModelFolders, reaches_models
from pytest_npu.core.options import NpuOptions
from pytest_npu.core.phase_gate import PhaseGate
from pytest_npu.device.driver import DeviceHolder, environment
from pytest_npu.device.supervised import Messenger, Past

if TYPE_CHECKING:
    from pytest_npu.device.lock import NpuLock
    from pytest_npu.report.runlogs import RunLogs
    from pytest_npu.report.write import Written


class Role(enum.Enum):
    """What this process is."""

    MAIN = "main"
    CONTROLLER = "xdist controller"
    WORKER = "xdist worker"


@dataclass(frozen=True, eq=False)
class TestInfo:
    """What the plugin knows of a collected test."""

    __test__ = False

    nodeid: str
    model: str
    folder: Path | None
    phase: int | None
    perf: bool
    device: bool


@dataclass(eq=False, repr=False)  # generated methods cost start-up time
class NpuState:
    """Options, device, gates and event sink of one pytest process."""

    config: pytest.Config
    options: NpuOptions
    role: Role
    sink: Sink
    logs: RunLogs | None
    device: DeviceHolder
    gate: PhaseGate
    folders: ModelFolders = field(default_factory=ModelFolders)
    active: bool = False
    tests: dict[str, TestInfo] = field(default_factory=dict)
    current: TestInfo | None = None
    deployments: dict[Path, Any] = field(default_factory=dict)
    #: Seconds the running phase of the running test waited for the lock.
    lock_wait_s: float = 0.0
    #: Node ids of performance tests that left a record.
    measured: set[str] = field(default_factory=set)
    deselected: dict[str, str] = field(default_factory=dict)
    #: Model folder and phase of tests that were collected and then deselected.
    left_out: set[tuple[Path, int]] = field(default_factory=set)
    #: Node ids of tests that began in this process or in a worker.
    started: set[str] = field(default_factory=set)
    #: Seconds from `@pytest.mark.npu_hang_timeout`, by node id.
    hang_limits: dict[str, float] = field(default_factory=dict)
    #: Node ids of tests that failed in this process, and how often tests were run again.
    failed: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    #: Device clock at the last report.
    device_mark: float = 0.0
    #: Files of timelines: path, events, error, unfinished.
    timelines: list[dict[str, Any]] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    #: The end of the session is logged, or what there is was reported without it.
    finished: bool = False
    #: Records by node id, kept only for a pytest-html page.
    keep_records: bool = False
    records: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    worker_id: str = ""
    #: Under a supervisor: the folder shared with it, what earlier children did, the way to tell it things.
    control: Path | None = None
    past: Past = field(default_factory=Past)
    messenger: Messenger | None = None
    stacks_file: IO[str] | None = None
    #: True while results of an earlier child are shown.
    replaying: bool = False

    def activate(self) -> None:
        """Something of ours is part of this run: from here on it is logged."""
        if self.active:
            return
        self.active = True
        if self.role is Role.WORKER:
            return
        self.emit(
            "session_start",
            run_id=self.options.run_id or (self.logs.run_id if self.logs else ""),
            argv=list(self.config.invocation_params.args),
            rootdir=str(self.config.rootpath),
            pid=os.getpid(),
            options=self._option_summary(),
            **environment(),
        )
        from pytest_npu.device.preflight.feature import run_preflight

        facts = run_preflight(self.config, self.device)
        self.emit("preflight", facts=facts)
        label = self.device.label
        if self.options.fault is not None:
            label += f", {FAULT_PLANTED}: {self.options.fault}"
        self.emit("device", name=self.device.name, label=label, details=self.device.identity)

    def is_expected(self) -> bool:
        """True when the command line asks for us or reaches a model folder; known before the collection."""
        return self.options.asked or reaches_models(self.config)

    def _option_summary(self) -> dict[str, Any]:
        options = self.options
        return {
            "model": options.model,
            "checkpoint": str(options.checkpoint) if options.checkpoint else None,
            "prompts": "all" if options.prompts is None else options.prompts,
            "n_tokens": options.n_tokens,
            "phase_order": options.phase_order,
            "reference_cache": options.use_cache,
            "fault": options.fault,
        }

    def emit(self, event: str, *, model: str | None = None, **fields: Any) -> None:
        """Send one event to the log."""
        self._keep_record(event, fields)
        self.sink.emit(make_event(event, model=model, **fields))

    def _keep_record(self, event: str, fields: dict[str, Any]) -> None:
        if event == "record" and self.keep_records:
            self.records.setdefault(fields["nodeid"], []).append((fields["kind"], fields["payload"]))

    def receive(self, event: Event) -> None:
        """Take an event of a worker. Called from xdist's receiver thread: must not raise."""
        if event["event"].startswith("_"):  # a message to the supervisor
            self.sink.emit(event)
            return
        if event["event"] == "timeline":
            self.timelines.append(event)
            if not self.active:
                return
        self.activate()
        if event["event"] == "collected":
            self._remember(event)
        self._keep_record(event["event"], event)
        if event["event"] == "test_start":
            self.started.add(event["nodeid"])
        if event["event"] == "deselected":
            self.deselected.update(dict.fromkeys(event["nodeids"], event["reason"]))
        if event["event"] == "test_phase" and event["outcome"] == "failed":
            self.gate.note_failure(str(event["model"]), event.get("phase"), event["nodeid"])
        self.sink.emit(event)

    def _remember(self, event: Event) -> None:
        model = str(event["model"])
        for test in event["tests"]:
            folder = self.folders.of_nodeid(test["nodeid"], self.config.rootpath)
            self.tests[test["nodeid"]] = TestInfo(
                test["nodeid"], model, folder, test["phase"], test["perf"], test["device"]
            )

    def make_lock(self) -> NpuLock:
        """The lock of this run: the machine-wide one with `--npu`, none on the twin."""
        from pytest_npu.device.lock import LockConfig, NoLock, NpuLock

        kind = NpuLock if self.options.npu else NoLock
        return kind(LockConfig(self.options.lock_file, self.options.lock_timeout), self._on_lock)

    def _on_lock(self, action: str, fields: dict[str, Any]) -> None:
        current = self.current
        self.emit(
            "lock",
            model=current.model if current else None,
            nodeid=current.nodeid if current else None,
            action=action,
            worker=self.worker_id,
            **fields,
        )
        if action in ("acquired", "timeout"):
            self.lock_wait_s += fields["waited_s"]
        if action == "waiting":
            self.tell_user(
                f"npu: waiting for the lock {fields['path']} since {fields['waited_s']:.0f} s, "
                f"held by {fields['holder']}"
            )

    def tell_user(self, text: str) -> None:
        """Print a line now, past pytest's output capture."""
        capture = self.config.pluginmanager.getplugin("capturemanager")
        if capture is None:
            print(text, file=sys.stderr, flush=True)
            return
        with capture.global_and_fixture_disabled():
            print(f"\n{text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close deployments and logs at the end of the process."""
        for deployment in self.deployments.values():
            close = getattr(deployment, "release_runners", None)
            if callable(close):
                close()
        self.deployments.clear()
        if self.logs is not None:
            self.logs.close()


STATE: pytest.StashKey[NpuState] = pytest.StashKey()


def state_of(config: pytest.Config) -> NpuState:
    """The plugin's state of this run; who asks for it takes part."""
    if STATE not in config.stash:
        from pytest_npu.core.active import wake

        wake(config)
    return config.stash[STATE]
