"""Error figures that were published for silicon: `published.json`, rows that passed or are in tier.

The gate reads its own copy. A figure in a deployment's kernel registry sets no limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PUBLISHED_SOURCE = "published-silicon, Xilinx/mlir-air e972f2942"
FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Published:
    """The largest figures of a kernel at one shape.

    Attributes:
        mean_rel_L1: mean error of the whole output, as :class:`Metrics` defines it.
        elements_over: elements beyond the tolerance, 0 where none is stated.
    """

    mean_rel_L1: float  # noqa: N815 - the field's published name
    elements_over: int = 0


def published(op: str, method: str, dims: Mapping[str, int], causal: bool = False) -> Published | None:
    """Return what was published for this kernel and shape, or None."""
    return _figures().get((op, method, frozenset(dims.items()), causal))


@lru_cache(maxsize=1)
def _figures() -> dict[tuple[str, str, frozenset[tuple[str, int]], bool], Published]:
    rows = json.loads(FILE.read_text(encoding="utf-8"))["figures"]
    return {
        (row["op"], row["method"], frozenset(row["dims"].items()), row.get("causal", False)): Published(
            row["mean_rel_L1"], row.get("elements_over", 0)
        )
        for row in rows
    }
