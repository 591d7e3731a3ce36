"""A failed phase of a model blocks its later ones."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pytest_npu.core.events import Event
from pytest_npu.core.exceptions import DevicePoisoned
from pytest_npu.core.phases import phase_label
from pytest_npu.core.state import NpuState

#: Node id of the failure that blocks a test; empty when none does.
BLOCKED_BY: pytest.StashKey[str] = pytest.StashKey()


class PhaseGate:
    """Remembers failed phases per model and says which tests they block."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._failed: dict[str, dict[int, str]] = {}

    def restore(self, failed: Mapping[str, Mapping[str, str]]) -> None:
        """Take over failures of a process that died; the form is that of `export()`."""
        for model, phases in failed.items():
            for phase, nodeid in phases.items():
                self.note_failure(model, int(phase), nodeid)

    def export(self) -> dict[str, dict[str, str]]:
        """Failures as plain JSON: model -> phase -> node id."""
        return {m: {str(p): n for p, n in phases.items()} for m, phases in self._failed.items()}

    def note_failure(self, model: str, phase: int | None, nodeid: str) -> None:
        """A test of `phase` failed or ended in an error. Tests without a phase block nothing."""
        if phase is not None:
            self._failed.setdefault(model, {}).setdefault(phase, nodeid)

    def blocker(self, model: str, phase: int | None) -> tuple[int, str] | None:
        """Phase and node id of the earliest failure that blocks a test of `phase`, or None."""
        if not self.enabled or phase is None:
            return None
        return min(
            (failure for failure in self._failed.get(model, {}).items() if failure[0] < phase), default=None
        )


class PhaseGateHooks:
    """Skips what a failed phase blocks, and fails what wants a device that is out of use; owns the gate."""

    def __init__(self, state: NpuState, gate: PhaseGate) -> None:
        self._state = state
        self.gate = gate

    def pytest_npu_event(self, event: Event) -> None:
        """A test failed, here or in a worker; `pytest_npu_event`."""
        if event["event"] == "test_phase" and event["outcome"] == "failed":
            self.gate.note_failure(str(event["model"]), event.get("phase"), event["nodeid"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test whose model failed in an earlier phase; `pytest_runtest_setup`."""
        item.stash[BLOCKED_BY] = ""
        info = self._state.tests.get(item.nodeid)
        if info is None:
            return
        failure = self.gate.blocker(info.model, info.phase)
        if failure is not None:
            phase, item.stash[BLOCKED_BY] = failure
            pytest.skip(
                f"blocked: {phase_label(phase)} of {info.model} failed ({failure[1]}); "
                "--no-phase-order runs it anyway"
            )
        if info.device and (cause := self._state.device.poisoned()) is not None:
            pytest.fail(str(DevicePoisoned(cause)), pytrace=False)
