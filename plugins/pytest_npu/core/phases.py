"""Phases of a deployment: markers, labels and the order of the tests."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_npu.core.constants import PHASES

_MARKERS = {f"phase{number}": number for number in PHASES}
_IN_NAME = re.compile(r"(?<![a-z0-9])phase([0-7])(?![0-9])")
_IN_SOURCE = re.compile(r"\bmark\.phase([0-7])\b|\A\W*Phase ([0-7])\b")


def register_markers(config: pytest.Config) -> None:
    """Register `phase0` .. `phase7` and the plugin's other markers."""
    for number, title in PHASES.items():
        config.addinivalue_line("markers", f"phase{number}: gate of deployment phase {number} ({title})")
    if not any(line.startswith("slow:") for line in config.getini("markers")):
        # The suite of the model folders uses it, in repositories with --strict-markers as well.
        config.addinivalue_line("markers", "slow: takes more than about 20 s; `-m 'not slow'` leaves it out")
    config.addinivalue_line(
        "markers",
        "npu_hang_timeout(seconds): under a supervisor, longest time of one phase of this test; 0: no limit",
    )


def phases_in(test_file: Path) -> set[int]:
    """Phases of a test file, without importing it: in its name (`test_phase6_ladder.py`).

    Where the name has none, the marks of its own tests count, and a docstring that begins with the phase
    (`Phase 6: ...`).
    """
    named = {int(digit) for digit in _IN_NAME.findall(test_file.stem)}
    return named or {
        int(marked or told) for marked, told in _IN_SOURCE.findall(test_file.read_text(encoding="utf-8"))
    }


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
