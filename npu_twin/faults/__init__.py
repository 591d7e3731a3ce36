"""The fault catalogue: known bugs of LLM deployments on NPUs, each one switchable.

    with faults.find("gemm_k_tiling").plant():
        ...                                   # every deployment that is opened here has the bug

``python -m npu_twin.faults list`` shows them. The catalogue is the sum of the entry points of the group
:data:`GROUP`, loaded when asked for: this package registers the faults of the device, its driver and its
compiler, any other package adds its own by naming a tuple of :class:`Fault`::

    [project.entry-points.npu_faults]
    my_model = "my_package.faults:FAULTS"
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

from npu_twin.faults._types import STAGES, Fault, Kind, Unplanted, everywhere
from npu_twin.faults.unplanted import UNPLANTED

__all__ = [
    "GROUP",
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

GROUP = "npu_faults"
"""Group of entry points, each of which is a tuple of faults."""


@lru_cache(maxsize=1)
def load() -> tuple[Fault, ...]:
    """All faults, entry points in the order of their names.

    Raises LookupError when no package registers any, ValueError when two faults share a name.
    """
    registered = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    if not registered:
        raise LookupError(
            f"no entry point of the group '{GROUP}' is installed, so there are no faults; install the "
            "package from its folder: pip install -e ."
        )
    found: dict[str, Fault] = {}
    for point in registered:
        for fault in point.load():
            if fault.name in found:
                raise ValueError(f"two faults are called {fault.name}; the second is in {point.value}")
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
