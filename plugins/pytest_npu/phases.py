"""Phases of a deployment: markers, order of the tests, and a failed phase blocking the later ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from .constants import PHASES

_MARKERS = {f"phase{number}": number for number in PHASES}


def register_markers(config: pytest.Config) -> None:
    """Register `phase0` .. `phase7` and the plugin's other markers."""
    for number, title in PHASES.items():
        config.addinivalue_line("markers", f"phase{number}: gate of deployment phase {number} ({title})")
    config.addinivalue_line(
        "markers",
        "npu_hang_timeout(seconds): under a supervisor, longest time of one phase of this test; 0: no limit",
    )


def phase_of(item: pytest.Item) -> int | None:
    """Phase of a test; the closest marker wins, the higher one of equals. None without a phase marker."""
    for mark in item.iter_markers():
        if mark.name in _MARKERS:
            return _MARKERS[mark.name]
    return None


def phase_label(phase: int | None) -> str:
    """`phase 6 finalize`, or `no phase`."""
    return "no phase" if phase is None else f"phase {phase} {PHASES[phase]}"


def order_by_phase(items: list[pytest.Item], model_of: Callable[[pytest.Item], str | None]) -> None:
    """Sort the tests of every model by phase, in place; tests without a model stay where they are.

    The places that model tests occupy are filled model by model, in order of first appearance, so that one
    deployment is finished before the next is opened. Tests without a phase come first: they are the quick
    unit tests of a model, and no gate depends on them. Within a phase the given order holds.
    """
    places: list[int] = []
    by_model: dict[str, list[pytest.Item]] = {}
    for place, item in enumerate(items):
        model = model_of(item)
        if model is not None:
            places.append(place)
            by_model.setdefault(model, []).append(item)

    def key(item: pytest.Item) -> int:
        phase = phase_of(item)
        return -1 if phase is None else phase

    ordered = [item for tests in by_model.values() for item in sorted(tests, key=key)]
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


@dataclass(frozen=True, eq=False)
class Failure:
    """The first failure of a phase."""

    phase: int
    nodeid: str


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

    def blocker(self, model: str, phase: int | None) -> Failure | None:
        """The failure that blocks a test of `phase`, or None. The earliest failed phase is named."""
        if not self.enabled or phase is None:
            return None
        earlier = sorted(p for p in self._failed.get(model, {}) if p < phase)
        return Failure(earlier[0], self._failed[model][earlier[0]]) if earlier else None
