"""The rules as data (``rules.json``) and the numbers of the device that predicates share.

A rule has an id, a sentence, the way it shows when broken, the kernels it concerns and its public source.
``fact`` entries have no predicate: they describe the device, or follow from other rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from npu_twin.constraints._types import Rule

COLUMNS = 8
ROWS = 4
L1_BYTES = 65536
L2_BYTES = 524288
SHIM_STREAMS = 2 * COLUMNS
"""Host-to-array channels of the whole array, two per column; as many run the other way."""
MAX_REPEAT = 255
MAX_STRIDE = 1048576
MAX_BUFFER_BYTES = 1 << 32
HW_CONTEXTS = 10
"""Loading about this many ELFs in one process exhausts the driver's contexts."""


def _load() -> dict[str, Rule]:
    data = json.loads(Path(__file__).with_name("rules.json").read_text(encoding="utf-8"))
    return {row["id"]: Rule(**{**row, "ops": tuple(row["ops"])}) for row in data["rules"]}


RULES: Mapping[str, Rule] = _load()
"""All rules by id."""

SWITCHES = frozenset(rule.id for rule in RULES.values() if rule.enforcement == "switch")
"""Rules that are checked only when asked for: passing measurements contradict them."""
