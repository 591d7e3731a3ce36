"""One layer of one prefill or decode step while its launches are judged: what is known of it so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llms.verify.contract.launches import ElfRun
from llms.verify.contract.records import Array
from llms.verify.localise.checkpoint import Truth
from llms.verify.localise.judge import Row, wide
from llms.verify.localise.naming import figure, same_bits
from llms.verify.localise.stages import Stages

KVHeads = Mapping[int, list[Array]]

# A rotary value may be one step of bf16 off, where transformers' f32 angle rounds another way.
TABLE_LIMIT = 2.0**-8


@dataclass(frozen=True)
class Step:
    """One prefill (`step` -1) or one decode step: token ids that go in, position of the first of them."""

    path: str
    step: int
    ids: tuple[int, ...]
    position: int

    def row(self, layer: int, kernel: str, result: str, kind: str, ok: bool, **more: Any) -> Row:
        """A comparison made in this step."""
        return Row(self.path, self.step, layer, kernel, result, kind, ok, **more)


@dataclass
class LayerPass:
    """A layer in a step.

    previous: output of the layer before, None when unknown. keys, values: by layer, what earlier steps have
    put into the KV cache, [kv_heads, positions, head_dim] each. known: results so far, as on the device.
    """

    truth: Truth
    step: Step
    index: int
    stages: Stages
    previous: Array | None
    keys: KVHeads
    values: KVHeads
    known: dict[str, Array] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.missing = set(self.stages.names())

    def row(self, kernel: str, result: str, kind: str, ok: bool, **more: Any) -> Row:
        """A comparison in this layer."""
        return self.step.row(self.index, kernel, result, kind, ok, **more)

    def equal(self, run: ElfRun, name: str, given: Array, wanted: Array, what: str = "") -> Row:
        """An input must hold the very bits that were computed before."""
        ok = same_bits(given, wanted)
        note = "" if ok else f"input '{name}' is not {what or f'the {name} that was computed'}"
        return self.row(run.elf, name, "host", ok, cosine=figure(ok, given, wanted), note=note)

    def angles(self, run: ElfRun, name: str, given: Array, kind: str) -> Row:
        """A rotary table must hold the checkpoint's angles of these positions."""
        table = self.stages.table
        rows = given.reshape(-1, table.shape[1])
        wanted = np.repeat(table, max(1, rows.shape[0] // len(table)), axis=0)
        ok = rows.shape == wanted.shape and bool((np.abs(wide(rows) - wide(wanted)) <= TABLE_LIMIT).all())
        note = "" if ok else f"'{name}' does not hold the checkpoint's angles" + self._other_position(rows)
        label, cosine = run.label(f"{name[-1]}_roped"), figure(ok, rows, wanted)
        return self.row(label, name, kind, ok, cosine=cosine, note=note)

    def _other_position(self, rows: Array) -> str:
        position = self.step.position
        if self.step.path != "decode":
            return ""
        table = wide(self.truth.table(position + 3))
        hits = np.flatnonzero((np.abs(table - wide(rows[0])) <= TABLE_LIMIT).all(axis=1))
        return f": they are those of position {hits[0]}, not {position}" if hits.size else ""
