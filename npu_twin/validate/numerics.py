"""Error figures: the twin's datapath with the published inputs, held against the published digits.

The judge is the plain float32 reference of `kernel_registry.harness`, imported only here: this command is a
tool beside the twin, not a part of it. Rows that differ only in what cannot change a value (herd, most tiles)
share one computation, and computations run in several processes.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from npu_twin.opset import OPS
from npu_twin.timing import rows

FIGURES = ("mean_rel_L1", "rel_err_max", "abs_err_max")
_STATUSES = {"pass", "in_tier_gate_fail"}
_FITTED = {"silu_mul", "gelu"}
GEMV_MEAN = 2e-6
GEMV_RELATIVE = 2.0**-7
"""One bf16 digit: the summation order of the reference decides it."""
SURROGATE_SHARE = 0.01
ATTENTION_WORST_SHARE = 0.12
DEFAULT_GATE = {"gemm": (1.6e-2, 1.5e-3)}


@dataclass(frozen=True)
class Task:
    """One computation: a launch with the harness inputs of its operation."""

    op: str
    dims: tuple[tuple[str, int], ...]
    method: str
    tile: tuple[tuple[str, int], ...]
    causal: bool
    gates: tuple[tuple[float, float], ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies the values."""
        return (self.op, self.dims, self.method, self.tile, self.causal)

    @property
    def cost(self) -> float:
        """Rough number of operations, for ordering."""
        d = dict(self.dims)
        if self.op == "gemm":
            work = 4.0 * d["M"] * d["K"] * d["N"]
            return work * (3.0 if self.method == "direct" else 1.0)
        if self.op == "flash_attention":
            return 60.0 * d["lq"] * d["lk"] * d["q_heads"] * d["head_dim"] / 64 * 16
        size = 1.0
        for value in d.values():
            size *= value
        return 100.0 * size


@dataclass(frozen=True)
class Measured:
    """Figures of one computation, also against a reference that is not rounded to the output type."""

    figures: Mapping[str, float]
    unrounded_mean: float
    offenders: Mapping[tuple[float, float], int]
    seconds: float


@dataclass(frozen=True)
class NumericsRow:
    """A published row with figures, and whether the twin reproduces them.

    Attributes:
        id: identifier in its file.
        kernel: operation.
        reproduced: every figure holds.
        misses: the figures that do not, as sentences.
        excuse: why the row is not expected to be reproduced; empty for most.
    """

    id: str
    kernel: str
    reproduced: bool
    misses: tuple[str, ...] = ()
    excuse: str = ""


@dataclass
class Judged:
    """All rows with figures, and the time their computation took."""

    rows: list[NumericsRow] = field(default_factory=list)
    seconds: float = 0.0

    def failures(self) -> list[str]:
        """Say which rows are not reproduced without an excuse."""
        return [
            f"{r.kernel}: row {r.id} not reproduced: {'; '.join(r.misses)}" for r in self.rows if _failed(r)
        ]


def _failed(row: NumericsRow) -> bool:
    return not row.reproduced and not row.excuse


def agrees_in_print(value: float, published: Decimal) -> bool:
    """Return whether `value`, rounded to the printed digits (two at least), reads like `published`."""
    digits = published.as_tuple()
    exponent = int(digits.exponent)
    if published:
        exponent = min(exponent, published.adjusted() - 1)
    return abs(Decimal(value) - published) <= Decimal(1).scaleb(exponent) * Decimal("0.5001")


def _within(value: float, published: Decimal, share: float) -> bool:
    return abs(value - float(published)) <= share * float(published)


def make_task(record: Mapping[str, Any]) -> Task | None:
    """Return the computation behind a record, or None for one without figures.

    Raises KeyError, TypeError or ValueError for an incomplete record.
    """
    if record.get("status", "pass") not in _STATUSES or record.get("mean_rel_L1") is None:
        return None
    call, _ = rows.launch_of(record)
    method, tile = next(iter(OPS[call.op].methods), "default"), {}
    if call.op == "gemm":
        method = "external" if call.attrs.get("output_dtype") == "f32" else call.method
        tile = {"tile_k_l1": call.tile["tile_k_l1"]} if method == "direct" else {}
    elif call.op == "flash_attention":
        method, tile = call.method, dict(call.tile)
    gate = (float(record["rtol"]), float(record["atol"])) if record.get("atol") is not None else None
    gates = (gate,) if call.op == "gemm" and gate else ()
    causal = bool(call.attrs.get("causal"))
    return Task(call.op, tuple(call.dims.items()), method, tuple(sorted(tile.items())), causal, gates)


def measure(task: Task) -> Measured:
    """Run one computation. Needs numpy, and torch for the products."""
    import numpy as np

    from kernel_registry.harness import compare, make_inputs, offenders, reference_output
    from npu_twin.datapath import run_launch, standalone_launch

    start = time.perf_counter()
    dims, tile = dict(task.dims), dict(task.tile)
    attrs: dict[str, Any] = {}
    if task.op == "flash_attention":
        attrs = {"causal": task.causal, "heads_per_unroll": 2, "num_cascade_stages": 4}
    launch_tile = (
        tile if task.op != "gemm" or task.method != "direct" else {**tile, "tile_k_l2": tile["tile_k_l1"]}
    )
    launch = standalone_launch(task.op, dims, method=task.method, tile=launch_tile, attrs=attrs)
    inputs = make_inputs(task.op, dims, method=task.method, tile=tile)
    out = run_launch(launch, inputs)["out"]
    is_f32 = out.dtype == np.float32
    exact = reference_output(task.op, inputs, dims=dims, method=task.method, attrs=attrs, out_dtype="f32")
    from ml_dtypes import bfloat16

    reference = exact if is_f32 else exact.astype(bfloat16).astype(np.float32)
    wide = out.astype(np.float32)
    found = compare(wide, reference)
    unrounded = compare(wide, exact).mean_rel_L1
    over = {gate: offenders(wide, reference, rtol=gate[0], atol=gate[1]).count for gate in task.gates}
    figures = {name: float(getattr(found, name)) for name in FIGURES}
    return Measured(figures, float(unrounded), over, time.perf_counter() - start)


def _prepare_worker() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def compute(tasks: Sequence[Task], processes: int, quiet: bool = False) -> dict[tuple[object, ...], Measured]:
    """Run all computations, the longest first, and return their figures by `Task.key`."""
    merged: dict[tuple[object, ...], Task] = {}
    for task in tasks:
        known = merged.get(task.key)
        gates = tuple(sorted({*(known.gates if known else ()), *task.gates}))
        merged[task.key] = Task(task.op, task.dims, task.method, task.tile, task.causal, gates)
    ordered = sorted(merged.values(), key=lambda t: -t.cost)
    done: dict[tuple[object, ...], Measured] = {}
    if processes <= 1 or len(ordered) <= 1:
        for task in ordered:
            done[task.key] = measure(task)
        return done
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context, initializer=_prepare_worker) as pool:
        futures = {pool.submit(measure, task): task for task in ordered}
        for count, future in enumerate(concurrent.futures.as_completed(futures), 1):
            done[futures[future].key] = future.result()
            if not quiet and (count % 20 == 0 or count == len(ordered)):
                print(f"numerics: {count} of {len(ordered)} computations", file=sys.stderr, flush=True)
    return done


def judge_row(record: Mapping[str, Any], task: Task, found: Measured) -> NumericsRow:
    """Hold the figures of one record against those of its computation."""
    published = {n: Decimal(str(record[n])) for n in FIGURES if record.get(n) is not None}
    fine = record.get("mean_rel_L1_fine")
    if fine is not None:
        published["mean_rel_L1"] = Decimal(str(fine))
    misses = [
        f"{name} {found.figures[name]:.4g}, published {value}"
        for name, value in published.items()
        if not _holds(task.op, name, found, value)
    ]
    status = record.get("status", "pass")
    for gate, count in found.offenders.items():
        if task.gates and gate != task.gates[0]:
            continue
        if (status == "pass") != (count == 0):
            misses.append(f"{count} elements over the gate, published status {status}")
    excuse = _excuse(record) if misses else ""
    return NumericsRow(str(record.get("id", "?")), task.op, not misses, tuple(misses), excuse)


def _holds(op: str, name: str, found: Measured, value: Decimal) -> bool:
    figure = found.figures[name]
    if op == "gemv":
        if name == "mean_rel_L1":
            return figure <= GEMV_MEAN + 1.1 * float(value)
        return name != "rel_err_max" or figure <= GEMV_RELATIVE
    if op == "flash_attention":
        if name == "mean_rel_L1":
            return _within(figure, value, SURROGATE_SHARE) or agrees_in_print(figure, value)
        return name != "abs_err_max" or _within(figure, value, ATTENTION_WORST_SHARE)
    if op in _FITTED:
        if name == "mean_rel_L1":
            return _within(figure, value, SURROGATE_SHARE)
        return name != "abs_err_max" or agrees_in_print(figure, value)
    if name == "mean_rel_L1" and agrees_in_print(found.unrounded_mean, value):
        return True  # some published rows were measured against a reference left in f32
    return agrees_in_print(figure, value)


def _excuse(record: Mapping[str, Any]) -> str:
    if record.get("other_inputs") or "other random inputs" in str(record.get("note", "")):
        return "measured with other random inputs"
    return str(record.get("numerics_exception", ""))


def judge(records: Iterable[Mapping[str, Any]], processes: int, quiet: bool = False) -> Judged:
    """Compute and judge all records that have figures."""
    start = time.perf_counter()
    pairs: list[tuple[Mapping[str, Any], Task]] = []
    result = Judged()
    for record in records:
        try:
            task = make_task(record)
        except (KeyError, TypeError, ValueError) as error:
            kernel = str(record.get("kernel", "?"))
            result.rows.append(
                NumericsRow(str(record.get("id", "?")), kernel, False, (f"incomplete: {error!r}",))
            )
            continue
        if task is not None:
            pairs.append((record, task))
    done = compute([task for _, task in pairs], processes, quiet)
    result.rows += [judge_row(record, task, done[task.key]) for record, task in pairs]
    result.seconds = time.perf_counter() - start
    return result
