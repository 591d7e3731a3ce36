"""What every part of the plugin needs to know of one pytest process: options, device, tests, where events go.

A concern keeps its own state in a plugin object of its own (see `pytest_npu.core.wake`); this is what they
share. `state_of` looks it up and never makes it.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_npu.core.constants import FAULT_PLANTED
from pytest_npu.core.events import Event, Sink, make_event
from pytest_npu.core.exceptions import NotTakingPart
from pytest_npu.core.models import ModelFolders, reaches_models
from pytest_npu.core.options import NpuOptions
from pytest_npu.device.driver import DeviceHolder, environment
from pytest_npu.device.lock import LockConfig, NoLock, NpuLock
from pytest_npu.device.preflight.feature import run_preflight


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
    """One pytest process: what it is, what was asked for, its device, its tests and its event sink."""

    config: pytest.Config
    options: NpuOptions
    role: Role
    sink: Sink
    device: DeviceHolder
    #: Name of the run's folder.
    run_id: str
    worker_id: str = ""
    #: Under a supervisor: the folder shared with it, and the tests that are over in an earlier child.
    control: Path | None = None
    replayed: Collection[str] = ()
    folders: ModelFolders = field(default_factory=ModelFolders)
    tests: dict[str, TestInfo] = field(default_factory=dict)
    current: TestInfo | None = None
    #: Something of ours is part of this run, so it is logged.
    active: bool = False

    def activate(self) -> None:
        """Something of ours is part of this run: from here on it is logged."""
        if self.active:
            return
        self.active = True
        if self.role is Role.WORKER:
            return
        self.emit(
            "session_start",
            run_id=self.run_id,
            argv=list(self.config.invocation_params.args),
            rootdir=str(self.config.rootpath),
            pid=os.getpid(),
            options=self._option_summary(),
            **environment(),
        )
        self.emit("preflight", facts=run_preflight(self.config, self.device))
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
        """Send one event of this process to the log, and to every plugin that listens."""
        self._deliver(make_event(event, model=model, **fields))

    def _deliver(self, event: Event) -> None:
        self.sink.emit(event)
        self.config.hook.pytest_npu_event(config=self.config, event=event)

    def receive(self, event: Event) -> None:
        """Take an event of a worker. Called from xdist's receiver thread: must not raise."""
        if event["event"].startswith("_"):  # a message to the supervisor
            self.sink.emit(event)
        elif event["event"] == "timeline" and not self.active:
            self.config.hook.pytest_npu_event(config=self.config, event=event)
        else:
            self.activate()
            self._deliver(event)

    def make_lock(self) -> NpuLock:
        """The lock of this run: the machine-wide one with `--npu`, none on the twin."""
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
        if action == "waiting":
            self.tell_user(
                f"npu: waiting for the lock {fields['path']} since {fields['waited_s']:.0f} s, "
                f"held by {fields['holder']}"
            )

    def tell_user(self, text: str) -> None:
        """Print a line now, past pytest's output capture."""
        capture = self.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
            print(text if capture is None else f"\n{text}", file=sys.stderr, flush=True)


STATE: pytest.StashKey[NpuState] = pytest.StashKey()


def state_of(config: pytest.Config) -> NpuState:
    """The state of this process. Raises NotTakingPart when the plugin takes no part in the run."""
    try:
        return config.stash[STATE]
    except KeyError:
        raise NotTakingPart from None
