"""Published timings that no formula of the model explains: a table, counted as parameters and kept short.

An entry scales the work of the launches it matches. Its rows take no part in a fit and are named, with the
reason, wherever the model is validated. They are not judged, except those of an entry that says so: they are
held to the limits by the formula alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from npu_twin.opset import LaunchLike


@dataclass(frozen=True)
class TableEntry:
    """Launches whose published time is off every formula.

    Attributes:
        op: operation.
        dims: sizes that must be equal.
        tile: tile values that must be equal.
        method: method that must be equal; empty for any.
        factor: measured work over the work by the formula.
        reason: what was measured and why no formula is used.
        judged: its rows count, without the factor.
    """

    op: str
    dims: Mapping[str, int]
    tile: Mapping[str, int]
    method: str
    factor: float
    reason: str
    judged: bool = False

    def matches(self, launch: LaunchLike) -> bool:
        """Return whether the entry applies to `launch`."""
        if launch.op != self.op or (self.method and launch.method != self.method):
            return False
        dims, tile = launch.dims, launch.tile
        return all(dims.get(k) == v for k, v in self.dims.items()) and all(
            tile.get(k) == v for k, v in self.tile.items()
        )


TABLE: tuple[TableEntry, ...] = (
    TableEntry(
        "rms_norm",
        {"N": 2048},
        {},
        "",
        1.35,
        "rows of 2048 take a third longer per element than rows of 1536 and 2560, on one tile as on eight: a "
        "property of the core's code at this one length",
    ),
    TableEntry(
        "gemm",
        {"K": 3584, "N": 3584},
        {"tile_k_l2": 256},
        "fused-cast",
        12.6,
        "one K tiling of one shape collapses to a twelfth of the speed of its neighbours 64 and 128, "
        "published without an explanation",
        judged=True,
    ),
)

_OPS = frozenset(entry.op for entry in TABLE)


def entry_of(launch: LaunchLike) -> TableEntry | None:
    """Return the table entry that a launch falls under, or None."""
    if launch.op not in _OPS:
        return None
    return next((entry for entry in TABLE if entry.matches(launch)), None)


def factor(launch: LaunchLike) -> float:
    """Return the factor on the work of a launch, 1 for nearly all."""
    entry = entry_of(launch)
    return 1.0 if entry is None else entry.factor
