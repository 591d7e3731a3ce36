"""Time of a launch in microseconds: its work, which the operation knows, and loading, filling, its program.

Every formula is a bound of the memory system or of a core, plus the parts that nothing hides. Sizes are in
elements, traffic in bytes; a time in `GB/s` divides bytes by 1000 to give microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from npu_twin.npu2 import TILES
from npu_twin.ops import OPS
from npu_twin.opset import LaunchLike, Op, Values
from npu_twin.timing.exceptions import factor
from npu_twin.timing.parameters import current


def _op(launch: LaunchLike) -> Op:
    if launch.op not in OPS:
        raise ValueError(f"timing: no model for the operation {launch.op!r}")
    return OPS[launch.op]


def work_us(p: Values, launch: LaunchLike, alone: bool = False, table: bool = True) -> float:
    """Return the work of one launch, without loading it.

    `alone` says that it is built as a program of its own; `table` applies the table of exceptions. Raises
    ValueError for an operation without a model.
    """
    op = _op(launch)
    us = op.work(p, launch, alone) * (factor(launch) if table else 1.0)
    return us + op.second_launch(p, launch) if op.second_launch else us


def reload_us(p: Values, count: int) -> float:
    """Return what it takes to load a launch that occupies `count` compute tiles."""
    return p["program.reload_us"] + p["program.reload_us_per_tile"] * count


def one_row(launches: Iterable[LaunchLike]) -> bool:
    """Return whether a program works on one row: it multiplies matrices with vectors."""
    return any(_op(launch).one_row for launch in launches)


def loaded_us(p: Values, launch: LaunchLike, in_one_row: bool = False, table: bool = True) -> float:
    """Return loading, first fill and work of one launch inside a program.

    `in_one_row` says that the program works on one row: its other launches load as fast as its products.
    `table` applies the table of exceptions.
    """
    op, work = _op(launch), work_us(p, launch, table=table)
    if op.load:
        return p[op.load] + work
    fill = "" if op.one_stream else op.fill
    loading = reload_us(p, TILES if op.whole_array else launch.herd[0] * launch.herd[1])
    if in_one_row or op.one_row:
        loading *= p["program.one_row_load_ratio"]
    return loading + (p[fill] if fill else 0.0) + work


def program_ratio(p: Values, launches: Iterable[LaunchLike]) -> float:
    """Return how much longer the launches of a program take between the other programs of a model.

    Attention has a ratio of its own; programs of one row, which wait for weights, have none.
    """
    ops = [_op(launch) for launch in launches]
    if any(op.load for op in ops):
        return p["model.attention_ratio"]
    return 1.0 if any(op.one_row for op in ops) else p["model.program_ratio"]


def launches_us(p: Values, launches: Sequence[LaunchLike]) -> list[float]:
    """Return the time of every launch of a program between the other programs of a model."""
    ratio, narrow = program_ratio(p, launches), one_row(launches)
    return [ratio * loaded_us(p, launch, narrow) for launch in launches]


def alone_us(p: Values, launch: LaunchLike, table: bool = True) -> float:
    """Return the run time of a kernel that is a program of its own, as the registry measures it.

    The fused-cast GEMM consists of two launches, attention sets up channels: they are loaded at every run.
    The others are measured from a binary that holds one configuration of the array and needs no loading.
    """
    op = _op(launch)
    if op.load or (op.second_launch and op.second_launch(p, launch)):
        return p["program.start_us"] + loaded_us(p, launch, table=table)
    work = work_us(p, launch, alone=True, table=table)
    return p["program.start_us"] + (p[op.fill] if op.fill else 0.0) + work


def launch_us(launch: LaunchLike) -> float:
    """Return the device time in microseconds of one launch inside a program: loading, first data, work.

    Raises:
        ValueError: for an operation the model does not know.
        KeyError: for a size or tile value that the operation needs and the launch does not name.
    """
    return loaded_us(current(), launch)


def standalone_us(launch: LaunchLike) -> float:
    """Return the run time in microseconds of a kernel on its own, as the kernel registry measures it.

    Raises as `launch_us` does.
    """
    return alone_us(current(), launch)
