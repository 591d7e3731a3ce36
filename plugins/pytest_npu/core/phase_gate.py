"""A failed phase of a model blocks its later ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
