"""The fault catalogue: known bugs of LLM deployments on NPUs, each one switchable.

    with faults.find("gemm_k_tiling").plant():
        ...                                   # every deployment that is opened here has the bug

``python -m npu_twin.faults list`` shows them. Faults of the device, its driver and its compiler are in this
package; those of a deployment's own code come from the modules in :data:`SOURCES`, imported when asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache

from npu_twin.faults._types import STAGES, Fault, Kind, Unplanted, everywhere
from npu_twin.faults.unplanted import UNPLANTED

__all__ = [
    "SOURCES",
    "STAGES",
    "UNPLANTED",
    "Fault",
    "Kind",
    "Unplanted",
    "everywhere",
    "find",
    "load",
    "names",
]

SOURCES = ("npu_twin.faults.compile", "npu_twin.faults.device", "llms.faults")
"""Modules with a tuple ``FAULTS``. A package that is not installed is left out."""


@lru_cache(maxsize=1)
def load() -> tuple[Fault, ...]:
    """All faults, in the order of the report. Raises ValueError when two share a name."""
    found: dict[str, Fault] = {}
    for source in SOURCES:
        if importlib.util.find_spec(source.partition(".")[0]) is None:
            continue
        for fault in importlib.import_module(source).FAULTS:
            if fault.name in found:
                raise ValueError(f"two faults are called {fault.name}")
            found[fault.name] = fault
    return tuple(found.values())


def names() -> tuple[str, ...]:
    """Names of all faults."""
    return tuple(fault.name for fault in load())


def find(name: str) -> Fault:
    """Return a fault by name. Raises KeyError that lists the names."""
    for fault in load():
        if fault.name == name:
            return fault
    raise KeyError(f"there is no fault {name!r}; known: {', '.join(names())}")
