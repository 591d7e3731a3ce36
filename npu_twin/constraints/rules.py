"""The rules as data (``rules.json``) and what the check of a program reports.

A rule has an id, a sentence, the way it shows when broken, the kernels it concerns and its public source.
``fact`` entries have no predicate: they describe the device, or follow from other rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from npu_twin.opset import ShowsAs

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


def _load() -> dict[str, Rule]:
    data = json.loads(Path(__file__).with_name("rules.json").read_text(encoding="utf-8"))
    return {row["id"]: Rule(**{**row, "ops": tuple(row["ops"])}) for row in data["rules"]}


RULES: Mapping[str, Rule] = _load()
"""All rules by id."""

SWITCHES = frozenset(rule.id for rule in RULES.values() if rule.enforcement == "switch")
"""Rules that are checked only when asked for: passing measurements contradict them."""
