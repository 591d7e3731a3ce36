"""Value types of the constraint check: what a rule reads, what it reports, what the search proposes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

ShowsAs = Literal["build", "compile", "place", "hang", "runtime", "silent"]
"""How the real tool chain shows a broken rule: the builder refuses, the compiler fails, placement fails, the
run ends in a time-out, the run fails, or the numbers are wrong without an error.
"""

Enforcement = Literal["law", "table", "switch", "fact"]
"""``law``: a formula, always checked. ``table``: exact observations, always checked. ``switch``: reported
once and contradicted by passing measurements, checked only when asked for. ``fact``: nothing to check.
"""


@dataclass(frozen=True)
class Rule:
    """One constraint of the device or its tool chain.

    ``source`` is a path of Xilinx/mlir-air at e972f2942, or the arithmetic it follows from.
    """

    id: str
    title: str
    shows_as: ShowsAs
    ops: tuple[str, ...]
    source: str
    enforcement: Enforcement = "law"


@dataclass(frozen=True)
class Violation:
    """A broken rule, with the numbers that break it and a configuration that would fit.

    ``launch`` is the name of the launch, empty for a rule of the whole program; ``values`` are the operands
    of the rule; ``suggestion`` is empty when no legal configuration was found.
    """

    rule_id: str
    shows_as: ShowsAs
    message: str
    values: Mapping[str, Any] = field(default_factory=dict)
    suggestion: str = ""
    launch: str = ""

    def __str__(self) -> str:
        where = f"launch {self.launch}: " if self.launch else ""
        values = ", ".join(f"{k}={v}" for k, v in self.values.items())
        text = f"{where}rule {self.rule_id} ({self.shows_as}): {self.message}"
        if values:
            text += f" [{values}]"
        return f"{text}; {self.suggestion}" if self.suggestion else text


@dataclass(frozen=True)
class Found:
    """What a predicate yields: rule id, sentence, values. ``shows_as`` overrides the rule's own."""

    rule_id: str
    message: str
    values: Mapping[str, Any]
    shows_as: ShowsAs | None = None


class LaunchLike(Protocol):
    """The part of a launch that rules read; ``npu_twin.listing.Launch`` and ``Config`` have it."""

    @property
    def op(self) -> str:
        """Operation of the kernel vocabulary, e.g. ``gemm``."""

    @property
    def method(self) -> str:
        """Implementation, e.g. ``fused-cast``."""

    @property
    def dims(self) -> Mapping[str, int]:
        """Problem dimensions by name."""

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes, e.g. ``causal``."""

    @property
    def tile(self) -> Mapping[str, int]:
        """Tile sizes by name."""

    @property
    def herd(self) -> tuple[int, int]:
        """Cores along the columns and the rows of the array."""


Findings = Iterator[Found]


@dataclass(frozen=True)
class Config:
    """One configuration of a kernel at a shape. Reads like a launch, so ``check`` accepts it."""

    op: str
    method: str
    dims: Mapping[str, int]
    tile: Mapping[str, int]
    herd: tuple[int, int]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def cores(self) -> int:
        """Number of cores in use."""
        return self.herd[0] * self.herd[1]

    def describe(self) -> str:
        """One line: method, tiles, herd and the attributes that belong to the tiling."""
        parts = [f"{k}={v}" for k, v in self.tile.items()]
        parts += [
            f"{k}={self.attrs[k]}" for k in ("heads_per_unroll", "num_cascade_stages") if k in self.attrs
        ]
        return f"{self.method} {' '.join(parts)} herd {self.herd[0]}x{self.herd[1]}".replace("  ", " ")
