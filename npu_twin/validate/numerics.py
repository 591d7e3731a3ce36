"""Error figures: the twin's datapath with the published inputs, held against the published digits.

The judge is a plain float32 reference that shares no code with the twin: the entry point `fp32` of the group
`npu_kernel_references`. Rows that differ only in what cannot change a value (herd, most tiles)
share one computation, and computations run in several processes.
"""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from npu_twin import npu2
from npu_twin.extensions import kernel_references
from npu_twin.ops import OPS
from npu_twin.timing import records
from npu_twin.validate import known

FIGURES = ("mean_rel_L1", "rel_err_max", "abs_err_max")
_STATUSES = {"pass", "in_tier_gate_fail"}
_SURROGATES = {"silu_mul", "gelu", "flash_attention"}
GEMV_MEAN = 2e-6
GEMV_RELATIVE = 2.0**-7
"""One bf16 digit: the summation order of the reference decides it."""
SURROGATE_SHARE = 0.01


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
    def inputs(self) -> tuple[object, ...]:
        """What identifies the inputs and the reference: computations that share them run together."""
        if self.op == "flash_attention":
            return self.key
        return (self.op, self.dims)

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
    if not math.isfinite(value):
        return False
    printed = published.normalize()
    exponent = int(printed.as_tuple().exponent)
    if printed:
        exponent = min(exponent, printed.adjusted() - 1)
    return abs(Decimal(value) - printed) <= Decimal(1).scaleb(exponent) * Decimal("0.5001")


def _within(value: float, published: Decimal, share: float) -> bool:
    return abs(value - float(published)) <= share * float(published)


def make_task(record: Mapping[str, Any]) -> Task | None:
    """Return the computation behind a record, or None for one without figures.

    Raises KeyError, TypeError or ValueError for an incomplete record.
    """
    if record.get("status", "pass") not in _STATUSES or record.get("mean_rel_L1") is None:
        return None
    call, _ = records.launch_of(record)
    method, tile = next(iter(OPS[call.op].methods), "default"), {}
    if call.op == "gemm":
        method = "external" if call.attrs.get("output_dtype") == "f32" else call.method
        tile = {"tile_k_l1": call.tile["tile_k_l1"]} if method == "direct" else {}
    elif call.op == "flash_attention":
        method, tile = call.method, dict(call.tile)
    for name in (*FIGURES, "mean_rel_L1_fine", "rtol", "atol"):
        value = record.get(name)
        if value is not None and (
            isinstance(value, bool)
            or not isinstance(value, (int, float, Decimal))
            or not 0 <= value < math.inf
        ):
            raise ValueError(f"{name} must be a number from 0 up, not {value!r}")
    largest = max(
        math.prod(s.shape) * 4 for s in OPS[call.op].signature(call.dims, method, call.tile).values()
    )
    if largest > npu2.MAX_BO_BYTES:
        raise ValueError(f"an operand of {largest >> 30} GiB in float32 is larger than any buffer")
    gate = (float(record["rtol"]), float(record["atol"])) if record.get("atol") is not None else None
    gates = (gate,) if call.op == "gemm" and gate else ()
    causal = bool(call.attrs.get("causal"))
    return Task(call.op, tuple(call.dims.items()), method, tuple(sorted(tile.items())), causal, gates)


def measure(tasks: Sequence[Task]) -> list[Measured]:
    """Run computations that share their inputs. Needs numpy, and torch for the products.

    Raises ExtensionMissing when no installed package has the references.
    """
    import numpy as np
    from ml_dtypes import bfloat16

    from npu_twin.datapath import run_launch, standalone_launch

    references = kernel_references()

    first = tasks[0]
    dims = dict(first.dims)
    attrs: dict[str, Any] = {}
    if first.op == "flash_attention":
        attrs = {"causal": first.causal, "heads_per_unroll": 2, "num_cascade_stages": 4}
    inputs = references.make_inputs(first.op, dims, method=first.method, tile=dict(first.tile))
    exact = references.reference_output(
        first.op, inputs, dims=dims, method=first.method, attrs=attrs, out_dtype="f32"
    )
    rounded = exact.astype(bfloat16).astype(np.float32)
    results = []
    for task in tasks:
        start = time.perf_counter()
        tile = dict(task.tile)
        if task.op == "gemm" and tile:
            tile["tile_k_l2"] = tile["tile_k_l1"]
        launch = standalone_launch(task.op, dims, method=task.method, tile=tile, attrs=attrs)
        out = run_launch(launch, inputs)["out"]
        reference = exact if out.dtype == np.float32 else rounded
        wide = out.astype(np.float32)
        found = references.compare(wide, reference)
        unrounded = found if reference is exact else references.compare(wide, exact)
        over = {g: references.offenders(wide, reference, rtol=g[0], atol=g[1]).count for g in task.gates}
        figures = {name: float(getattr(found, name)) for name in FIGURES}
        results.append(Measured(figures, float(unrounded.mean_rel_L1), over, time.perf_counter() - start))
    return results


def _prepare_worker() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def compute(tasks: Sequence[Task], processes: int, quiet: bool = False) -> dict[tuple[object, ...], Measured]:
    """Run all computations, the longest first, and return their figures by `Task.key`.

    Raises ExtensionMissing when no installed package has the references.
    """
    if tasks:
        kernel_references()  # missing ones are said before processes start
    merged: dict[tuple[object, ...], Task] = {}
    for task in tasks:
        known = merged.get(task.key)
        gates = tuple(sorted({*(known.gates if known else ()), *task.gates}))
        merged[task.key] = Task(task.op, task.dims, task.method, task.tile, task.causal, gates)
    groups: dict[tuple[object, ...], list[Task]] = {}
    for task in merged.values():
        groups.setdefault(task.inputs, []).append(task)
    ordered = sorted(groups.values(), key=lambda group: -sum(t.cost for t in group))
    done: dict[tuple[object, ...], Measured] = {}
    if processes <= 1 or len(ordered) <= 1:
        for group in ordered:
            done.update(zip((t.key for t in group), measure(group), strict=True))
        return done
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context, initializer=_prepare_worker) as pool:
        futures = {pool.submit(measure, group): group for group in ordered}
        for future in concurrent.futures.as_completed(futures):
            done.update(zip((t.key for t in futures[future]), future.result(), strict=True))
            if not quiet:
                print(
                    f"\rnumerics: {len(done)} of {len(merged)} computations",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
    if not quiet:
        print(file=sys.stderr)
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
    # In the sweeps "pass" tells right tilings from corrupt ones; the element-wise gate is that of the shapes.
    judges_gate = record.get("section", "tested_shapes") == "tested_shapes"
    for gate, count in found.offenders.items():
        if judges_gate and gate == task.gates[0] and (status == "pass") != (count == 0):
            misses.append(f"{count} elements over the gate, published status {status}")
    excuse = known.reason(record) if misses else ""
    return NumericsRow(str(record.get("id", "?")), task.op, not misses, tuple(misses), excuse)


def _holds(op: str, name: str, found: Measured, value: Decimal) -> bool:
    figure = found.figures[name]
    if op == "gemv":
        if name == "mean_rel_L1":
            return figure <= float(value) + GEMV_MEAN  # below it, the published reference was the coarser one
        return name != "rel_err_max" or abs(figure - float(value)) <= GEMV_RELATIVE
    if op in _SURROGATES:
        # The exp2 and tanh units are not public: surrogates are held to the mean, not to the worst element.
        return (
            name != "mean_rel_L1" or _within(figure, value, SURROGATE_SHARE) or agrees_in_print(figure, value)
        )
    if op == "gemm" and name == "mean_rel_L1" and agrees_in_print(found.unrounded_mean, value):
        return True  # some published rows were measured against a reference left in f32
    return agrees_in_print(figure, value)


def judge(records: Iterable[Mapping[str, Any]], processes: int, quiet: bool = False) -> Judged:
    """Compute and judge all records that have figures."""
    start = time.perf_counter()
    pairs: list[tuple[Mapping[str, Any], Task]] = []
    result = Judged()
    for record in records:
        try:
            task = make_task(record)
        except (KeyError, TypeError, ValueError, ArithmeticError, StopIteration) as error:
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
