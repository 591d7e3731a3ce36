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

from npu_twin.timing import kernels, tiling
from npu_twin.timing.parameters import Values
from npu_twin.timing.tiling import KernelCall

PUBLISHED_KERNELS = Path(__file__).resolve().parent.parent / "data" / "published_kernels.json"

ALONE = "alone"
"""A kernel measured on its own, as one configuration of the array."""
IN_PROGRAM = "in program"
"""One launch of a program of several."""
OWN_PROGRAM = "own program"
"""A program of one launch, called between other programs."""
ONE_LAUNCH = "one launch"
"""A program of one launch, called again and again: the launch is loaded each time."""

_OPS = {
    "gemm": "gemm",
    "gemv": "gemv",
    "rmsnorm": "rms_norm",
    "rms_norm": "rms_norm",
    "layernorm": "layer_norm",
    "layer_norm": "layer_norm",
    "rope": "rope",
    "flash_attention": "flash_attention",
    "eltwise_add": "eltwise_add",
    "bias_add": "bias_add",
    "silu_mul": "silu_mul",
    "gelu": "gelu",
}
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
_BOTH_FORMATS = "elf_vs_xclbin_same_driver"
_GEMM_METHODS = frozenset({"drain", "fused-cast", "direct", "external"})
_SIZES = (
    *("M", "K", "N", "rows", "head_dim", "n_elements", "lq", "lk", "dk", "dv", "q_heads", "kv_heads"),
    *("tile", "tile_m", "tile_k_l2", "tile_k_l1", "tile_n", "m_input", "herd_x", "herd_y", "tiles_used"),
    *("lqp", "lkp", "num_q_tiles", "heads_per_unroll", "num_cascade_stages", "dv_chunks"),
)
_LARGEST_SIZE = 1 << 31


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
    call: KernelCall
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
    records = content.get("records") if isinstance(content, Mapping) else content
    if not isinstance(records, list) or not records or not all(isinstance(r, Mapping) for r in records):
        raise ValueError(f'{path}: expected {{"records": [...]}} with one object per measurement')
    return [dict(r) for r in records]


def split(records: Iterable[Mapping[str, Any]]) -> tuple[list[Row], list[Unjudged]]:
    """Return the rows that the model is held against and the passing records that cannot be.

    An id that occurs twice (or is missing twice) gets a number, so that no row takes the place of another.
    """
    rows: list[Row] = []
    others: list[Unjudged] = []
    seen: Counter[str] = Counter()
    for record in records:
        if _text(record, "status", "pass") in _OTHER_STATUSES:
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
    identity = _text(record, "id", "?")
    name = _text(record, "kernel", "")
    kernel = _OPS.get(name)
    if kernel is None:
        return Unjudged(identity, name or "?", f"unknown kernel {name!r}", excused=False)
    if _text(record, "status", "pass") not in PASSING:
        return Unjudged(identity, kernel, f"unknown status {record['status']!r}", excused=False)
    if _text(record, "dtype_in", "bf16") != "bf16":
        return Unjudged(
            identity, kernel, f"input type {record['dtype_in']}, only bf16 is modelled", excused=True
        )
    try:
        check_sizes(record)
        measured, derived = _latency_us(kernel, record)
        if measured is None:
            if record.get("mean_rel_L1") is not None:
                return None
            legality = _text(record, "section", "") in _SWEEPS
            return Unjudged(identity, kernel, "neither a latency nor error figures in the record", legality)
        if not 0.0 < measured < math.inf:
            raise ValueError(f"the latency must be a positive number, not {measured!r}")
        call, assumed = launch_of(record)
    except KeyError as error:
        return Unjudged(identity, kernel, f"incomplete record: no {error.args[0]}", excused=False)
    except (TypeError, ValueError, ArithmeticError, StopIteration) as error:
        return Unjudged(identity, kernel, f"unusable record: {error}", excused=False)
    alternating = _text(record, "section", "") == _BOTH_FORMATS
    scope, doubt = _scope(record), _doubt(record)
    return Row(identity, kernel, call, scope, measured, derived, assumed, alternating, doubt)


def _text(record: Mapping[str, Any], name: str, default: str) -> str:
    value = record.get(name)
    return default if value is None else str(value)


def check_sizes(record: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first size of a record that is no positive whole number."""
    for name in _SIZES:
        value = record.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST_SIZE:
            raise ValueError(f"{name} must be a positive whole number, not {value!r}")
    if _text(record, "dtype_out", "bf16") not in ("bf16", "f32"):
        raise ValueError(f"dtype_out must be bf16 or f32, not {record['dtype_out']!r}")


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise ValueError(f"{name} must be a number, not {value!r}")
    return float(value)


def _doubt(record: Mapping[str, Any]) -> str:
    if record.get("latency_carried_over") or "not measured at this shape" in str(record.get("note", "")):
        return "rate carried over from another shape, not measured"
    if _text(record, "section", "") == _BOTH_FORMATS:
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
        return 6e-3 * record["n_elements"] / float(gbps), True
    if gbps and kernel == "gelu":
        return 4e-3 * record["n_elements"] / float(gbps), True
    return None, False


def _scope(record: Mapping[str, Any]) -> str:
    section = str(record.get("section", ""))
    if section == _BOTH_FORMATS:
        elf = record.get("output_format") == "elf" or "format elf" in str(record.get("note", ""))
        return ONE_LAUNCH if elf else ALONE
    if section != "in_situ_fused_elf":
        return ALONE
    own = record.get("own_program") or "one launch" in str(record.get("note", ""))
    own = own or record.get("kernel") == "flash_attention"
    return OWN_PROGRAM if own else IN_PROGRAM


def _herd(record: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    x, y = record.get("herd_x"), record.get("herd_y")
    return (int(x), int(y or 1)) if x else default


def launch_of(record: Mapping[str, Any]) -> tuple[KernelCall, bool]:
    """Return the launch that a record measured, and whether the rules had to choose its tile.

    Raises KeyError, TypeError or ValueError for an incomplete record.
    """
    check_sizes(record)
    return _call(_OPS[str(record.get("kernel", ""))], record)


def _call(kernel: str, record: Mapping[str, Any]) -> tuple[KernelCall, bool]:
    method = str(record.get("method") or "")
    if kernel == "gemm":
        return _gemm(method, record)
    if kernel == "gemv":
        m, k = int(record["M"]), int(record["K"])
        guess = tiling.gemv(m, k)
        if record.get("tile_m") is None:
            return guess, True
        tile = {"tile_m": int(record["tile_m"]), "m_input": int(record.get("m_input") or record["tile_m"])}
        return KernelCall("gemv", method or "external", {"M": m, "K": k}, tile, _herd(record, (8, 1))), False
    if kernel in ("rms_norm", "layer_norm"):
        m, n = int(record["M"]), int(record["N"])
        herd = _herd(record, tiling.rows_herd(m))
        return KernelCall(kernel, method, {"M": m, "N": n}, {}, herd), False
    if kernel == "rope":
        rows, head_dim = int(record["rows"]), int(record["head_dim"])
        herd = _herd(record, tiling.rows_herd(rows))
        return KernelCall(kernel, method, {"rows": rows, "head_dim": head_dim}, {}, herd), False
    if kernel == "flash_attention":
        return _attention(record)
    if kernel == "bias_add":
        rows = int(record["rows"])
        dims = {"rows": rows, "n": int(record.get("N") or record["n_elements"] // rows)}
        return KernelCall(kernel, method, dims, {}, _herd(record, (8, 1))), False
    width = record.get("tile_n") or record.get("tile")
    herd = _herd(record, (8, 2) if kernel == "gelu" else (8, 1))
    tile = {"tile_n" if kernel != "eltwise_add" else "tile": int(width)} if width else {}
    return KernelCall(kernel, method, {"n": int(record["n_elements"])}, tile, herd), not width


def _gemm(method: str, record: Mapping[str, Any]) -> tuple[KernelCall, bool]:
    """Return the launch of a GEMM record, and whether the rules had to choose a part of its tile.

    The `tile_n` of a record of a launch in a program is not used: in the published sweep four values a
    shape, from 48 to 256, took the same time to half a percent (kernels alone: a third more from 128 to 64),
    so the value of the sweep did not reach the program, which was built with the tile of its rule.
    """
    m, k, n = int(record["M"]), int(record["K"]), int(record["N"])
    if method and method not in _GEMM_METHODS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(sorted(_GEMM_METHODS))}")
    attrs: dict[str, object] = {"output_dtype": "f32"} if record.get("dtype_out") == "f32" else {}
    given = {key: record.get(key) for key in ("tile_m", "tile_k_l2", "tile_k_l1", "tile_n")}
    if _scope(record) == IN_PROGRAM:
        given["tile_n"] = None
    herd = _herd(record, (0, 0))
    if all(given.values()) and herd[0]:
        tile = {key: int(str(value)) for key, value in given.items()}
        return KernelCall("gemm", method or "drain", {"M": m, "K": k, "N": n}, tile, herd, attrs), False
    used = int(record.get("tiles_used") or _tiles_in_note(record) or 0)
    wanted = herd if herd[0] else (4, max(1, used // 4)) if used and used < 32 else None
    guess = tiling.gemm(m, k, n, method or "drain", wanted)
    tile = {key: int(str(given[key] or guess.tile[key])) for key in guess.tile}
    shape = guess.herd
    if not herd[0] and n % (tile["tile_n"] * shape[1]):
        shape = (shape[0], next(h for h in (4, 3, 2, 1) if n % (tile["tile_n"] * h) == 0))
    return KernelCall("gemm", guess.method, guess.dims, tile, shape, attrs), True


def _tiles_in_note(record: Mapping[str, Any]) -> int:
    words = str(record.get("note", "")).split()
    return int(words[-1]) if words[:2] == ["tiles", "used"] and words[-1].isdigit() else 0


def _attention(record: Mapping[str, Any]) -> tuple[KernelCall, bool]:
    guess = tiling.attention(
        int(record["lq"]),
        int(record["lk"]),
        int(record.get("dk") or record["head_dim"]),
        int(record["q_heads"]),
        int(record["kv_heads"]),
        bool(record.get("causal")),
    )
    tile = {key: int(record.get(key) or value) for key, value in guess.tile.items()}
    if record.get("dv_chunks"):
        tile["dv_tile"] = int(record.get("dv") or record["dk"]) // int(record["dv_chunks"])
    attrs = dict(guess.attrs)
    for key in ("heads_per_unroll", "num_cascade_stages"):
        attrs[key] = int(record.get(key) or int(str(attrs[key])))
    herd = _herd(record, guess.herd)
    return KernelCall("flash_attention", guess.method, guess.dims, tile, herd, attrs), not record.get("lqp")


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
