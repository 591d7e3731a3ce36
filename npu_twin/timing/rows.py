"""Published or own kernel measurements: reading them, and what they say to the timing model.

A file holds `{"records": [...]}`; a record names its kernel, sizes, tile, herd, latency and status with the
keys of the calibration file `npu_twin/data/published_kernels.json` (Xilinx/mlir-air e972f2942, snapshot
2026-08-22).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from npu_twin.opset import Config, Values
from npu_twin.timing import kernels, records
from npu_twin.timing.records import ALONE, IN_PROGRAM, ONE_LAUNCH, OWN_PROGRAM, text

PUBLISHED_KERNELS = Path(__file__).resolve().parent.parent / "data" / "published_kernels.json"

__all__ = ["ALONE", "IN_PROGRAM", "ONE_LAUNCH", "OWN_PROGRAM", "Row", "Unjudged", "parse", "predict_us"]

PASSING = frozenset({"pass", "passed"})
_OTHER_STATUSES = frozenset(
    {
        "in_tier",
        "in_tier_gate_fail",
        "build_fail",
        "compile_fail",
        "compile_timeout",
        "place_fail",
        "runtime_fail",
        "runtime_hang",
        "hang",
        "silent_corruption",
    }
)
_SWEEPS = frozenset({"tile_sweep", "herd_sweep"})
"""Sections whose records may say no more than that a configuration works."""


@dataclass(frozen=True)
class Row:
    """One measurement that the model can be held against.

    Attributes:
        id: identifier in its file.
        kernel: operation, in the vocabulary of the program listing.
        call: the launch it measured.
        scope: `ALONE`, `IN_PROGRAM`, `OWN_PROGRAM` or `ONE_LAUNCH`.
        measured_us: latency in microseconds.
        derived: the latency was computed from a rate.
        assumed_tile: the record has no tile, the rules of `tiling` chose one.
        alternating: measured while ELF and xclbin contexts alternated, which slows both (rule R2).
        doubt: why the row takes part in no fit, though it is judged like all; empty for nearly all.
    """

    id: str
    kernel: str
    call: Config
    scope: str
    measured_us: float
    derived: bool = False
    assumed_tile: bool = False
    alternating: bool = False
    doubt: str = ""

    @property
    def shape(self) -> tuple[object, ...]:
        """The problem size: rows of one shape are left out together in the cross-validation.

        A kernel that was measured at one or two sizes only (LayerNorm, bias) is split by herd and scope.
        """
        key: tuple[object, ...] = (self.kernel, *sorted(self.call.dims.items()))
        if self.kernel in ("layer_norm", "bias_add"):
            key += (self.call.herd, self.scope)
        return key

    @property
    def sizes(self) -> str:
        """The problem size as text."""
        return "x".join(str(v) for v in self.call.dims.values())


@dataclass(frozen=True)
class Unjudged:
    """A passing record that cannot be held against the model, and why.

    `excused` is true where the record itself says that it is no measurement of this kernel.
    """

    id: str
    kernel: str
    reason: str
    excused: bool


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a measurement file, its broken numbers as `Decimal` with the digits as written.

    Raises:
        ValueError: naming the file when it is no JSON or has no list of records.
        OSError: when it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    found = content.get("records") if isinstance(content, Mapping) else content
    if not isinstance(found, list) or not found or not all(isinstance(r, Mapping) for r in found):
        raise ValueError(f'{path}: expected {{"records": [...]}} with one object per measurement')
    return [dict(r) for r in found]


def split(found: Iterable[Mapping[str, Any]]) -> tuple[list[Row], list[Unjudged]]:
    """Return the rows that the model is held against and the passing records that cannot be.

    An id that occurs twice (or is missing twice) gets a number, so that no row takes the place of another.
    """
    rows: list[Row] = []
    others: list[Unjudged] = []
    seen: Counter[str] = Counter()
    for record in found:
        if text(record, "status", "pass") in _OTHER_STATUSES:
            continue
        made = parse(record)
        if made is None:
            continue
        seen[made.id] += 1
        if seen[made.id] > 1:
            made = dataclasses.replace(made, id=f"{made.id}#{seen[made.id]}")
        if isinstance(made, Row):
            rows.append(made)
        else:
            others.append(made)
    return rows, others


def parse(record: Mapping[str, Any]) -> Row | Unjudged | None:
    """Return the row of one record, the reason why it has none, or None for a record without a latency."""
    identity = text(record, "id", "?")
    name = text(record, "kernel", "")
    kernel = records.OPS.get(name)
    if kernel is None:
        return Unjudged(identity, name or "?", f"unknown kernel {name!r}", excused=False)
    if text(record, "status", "pass") not in PASSING:
        return Unjudged(identity, kernel, f"unknown status {record['status']!r}", excused=False)
    if text(record, "dtype_in", "bf16") != "bf16":
        return Unjudged(
            identity, kernel, f"input type {record['dtype_in']}, only bf16 is modelled", excused=True
        )
    try:
        records.check_sizes(record)
        measured, derived = _latency_us(kernel, record)
        if measured is None:
            if record.get("mean_rel_L1") is not None:
                return None
            legality = text(record, "section", "") in _SWEEPS
            return Unjudged(identity, kernel, "neither a latency nor error figures in the record", legality)
        if not 0.0 < measured < math.inf:
            raise ValueError(f"the latency must be a positive number, not {measured!r}")
        call, assumed = records.launch_of(record)
    except KeyError as error:
        return Unjudged(identity, kernel, f"incomplete record: no {error.args[0]}", excused=False)
    except (TypeError, ValueError, ArithmeticError, StopIteration) as error:
        return Unjudged(identity, kernel, f"unusable record: {error}", excused=False)
    alternating = text(record, "section", "") == records.BOTH_FORMATS
    scope, doubt = records.scope_of(record), _doubt(record)
    return Row(identity, kernel, call, scope, measured, derived, assumed, alternating, doubt)


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise ValueError(f"{name} must be a number, not {value!r}")
    return float(value)


def _doubt(record: Mapping[str, Any]) -> str:
    if record.get("latency_carried_over") or "not measured at this shape" in str(record.get("note", "")):
        return "rate carried over from another shape, not measured"
    if text(record, "section", "") == records.BOTH_FORMATS:
        return "session with ELF and xclbin in turn: the same binaries are published 1.4 times faster alone"
    return ""


def _latency_us(kernel: str, record: Mapping[str, Any]) -> tuple[float | None, bool]:
    if record.get("latency_us") is not None:
        return _number(record, "latency_us"), bool(record.get("latency_derived"))
    gflops, gbps = record.get("gflops"), record.get("gbps")
    if gflops and kernel == "gemm":
        return 2e-3 * float(record["M"] * record["K"] * record["N"]) / float(gflops), True
    if gflops and kernel == "gemv":
        return 2e-3 * float(record["M"] * record["K"]) / float(gflops), True
    if gflops and kernel == "flash_attention":
        pairs = record["lq"] * record["lk"] * (0.5 if record.get("causal") else 1.0)
        return 2e-3 * pairs * (record["dk"] + record["dv"]) * record["q_heads"] / float(gflops), True
    if gbps and kernel in ("eltwise_add", "silu_mul"):
        return 6e-3 * records.elements(record) / float(gbps), True
    if gbps and kernel == "gelu":
        return 4e-3 * records.elements(record) / float(gbps), True
    return None, False


def predict_us(p: Values, row: Row, table: bool = True) -> float:
    """Return what the model says to a row, in its scope; `table` applies the table of exceptions."""
    if row.alternating:
        slower = (p["program.alternating_ratio"] - 1.0) * kernels.work_us(p, row.call, table=table)
        return slower + predict_us(p, dataclasses.replace(row, alternating=False), table)
    if row.scope == ALONE:
        return kernels.alone_us(p, row.call, table)
    loaded = kernels.loaded_us(p, row.call, table=table)
    if row.scope == IN_PROGRAM:
        return loaded
    switch = p["program.context_switch_us"] if row.scope == OWN_PROGRAM else 0.0
    return p["program.start_us"] + switch + loaded
