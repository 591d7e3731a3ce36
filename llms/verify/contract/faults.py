"""Plant a fault by its name, whoever provides it: what judges asks for the name and knows no catalogue.

Faults are registered as entry points of the group ``npu_faults``, each a tuple of objects with ``name`` and
``plant``; the twin and the toolkit's faults are two of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import Any, Protocol

GROUP = "npu_faults"


class PlantableFault(Protocol):
    """What an entry point of the group is a tuple of, as far as a gate needs it."""

    @property
    def name(self) -> str:
        """Name that a user types."""
        ...

    def plant(self) -> AbstractContextManager[Any]:
        """A context manager: inside its block every deployment that is opened has the fault."""
        ...


def planted(name: str) -> AbstractContextManager[Any]:
    """The block in which this fault is there; enter it before the deployment is opened.

    Raises KeyError that lists the registered names.
    """
    known: list[str] = []
    for fault in _registered():
        if fault.name == name:
            return fault.plant()
        known.append(fault.name)
    raise KeyError(f"there is no fault {name!r}; known: {', '.join(known) or 'none, as no package has any'}")


def _registered() -> Iterator[PlantableFault]:
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        yield from point.load()
