"""Look up the best measured configuration of a kernel at a shape. Light: standard library only.

    >>> config("gemm", M=2048, K=2048, N=2048).method
    'fused-cast'

A shape without a row raises ``UnmeasuredShape``, which names the command that adds it; nothing is guessed.
Rows measured on published silicon win over rows measured on one's own, those over rows of the twin; among
equals the fastest wins. The environment variable ``NPU_KERNEL_REGISTRY`` names further registry folders
(separated like ``PATH``), laid out like this package: ``details/<op>.json``. A row of such a folder replaces
a packaged row with the same id.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ENV = "NPU_KERNEL_REGISTRY"
PACKAGED = Path(__file__).resolve().parent
PROVENANCES = ("published-silicon", "measured-silicon", "twin")
"""Best first."""
USABLE_STATUS = ("pass", "in_tier")
USABLE_CONTEXT = ("standalone", "tile_sweep", "herd_sweep")


class Kernel(NamedTuple):
    """What the registry must know of a kernel.

    Attributes:
        title: as the pages name it.
        dims: dimensions, in the order of a shape on the command line.
        tile: tile sizes without which a row cannot configure it.
        tier: accuracy of its rows, by the name that published rows give it; a GEMM has one per method.
    """

    title: str
    dims: tuple[str, ...]
    tile: tuple[str, ...] = ()
    tier: str = "bf16"


KERNELS: Mapping[str, Kernel] = {
    "gemm": Kernel("GEMM", ("M", "K", "N"), ("tile_m", "tile_k_l2", "tile_k_l1", "tile_n")),
    "gemv": Kernel("GEMV", ("M", "K"), ("tile_m", "m_input"), "f32_accumulate"),
    "gemv_add": Kernel("Cascade GEMV with residual add", ("M", "K"), ("tile_m", "m_input")),
    "norm_gateup_swiglu": Kernel("Fused norm, gate/up and SwiGLU (decode)", ("emb", "hidden")),
    "rms_norm": Kernel("RMSNorm", ("M", "N")),
    "layer_norm": Kernel("LayerNorm", ("M", "N")),
    "rope": Kernel("RoPE", ("rows", "head_dim")),
    "flash_attention": Kernel(
        "FlashAttention",
        ("lq", "lk", "head_dim", "q_heads", "kv_heads"),
        ("lqp", "lkp", "num_q_tiles"),
        "bf16_online_softmax",
    ),
    "eltwise_add": Kernel("Element-wise add", ("n",), ("tile",)),
    "bias_add": Kernel("Bias add", ("rows", "n")),
    "silu_mul": Kernel("SiLU-and-Mul", ("n",), ("tile_n",), "bf16_transcendental"),
    "gelu": Kernel("GELU", ("n",), ("tile_n",), "bf16_transcendental"),
}
"""All kernels, in the order of the pages."""

DIMS: Mapping[str, tuple[str, ...]] = {op: kernel.dims for op, kernel in KERNELS.items()}
"""Dimensions of every kernel."""

Row = Mapping[str, Any]


def shape_of(op: str, dims: Mapping[str, int]) -> str:
    """Shape as on the command line."""
    return "x".join(str(dims[name]) for name in DIMS[op])


class UnmeasuredShape(LookupError):
    """No row for this kernel and shape. ``command`` is the shell command that adds one."""

    def __init__(self, op: str, shape: str, detail: str, command: str) -> None:
        self.op = op
        self.shape = shape
        self.command = command
        text = f"the kernel registry has no usable {op} row for {shape}"
        super().__init__(f"{text}{f' ({detail})' if detail else ''}; add it with: {command}")


@dataclass(frozen=True)
class KernelConfig:
    """The configuration to build a kernel with. ``herd`` is columns by rows of cores.

    ``provenance`` tells where its figures come from; ``latency_us`` is the time of one launch in
    microseconds, None where the row has no time of its own.
    """

    op: str
    method: str
    tile: dict[str, int]
    herd: tuple[int, int]
    attrs: dict[str, Any]
    provenance: str
    row_id: str
    dims: dict[str, int] = field(default_factory=dict)
    latency_us: float | None = None
    status: str = "pass"
    used_by: tuple[str, ...] = ()
    note: str = ""

    def __hash__(self) -> int:
        return hash((self.row_id, self.op, self.method, self.herd))


def roots(registry: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Registry folders, first wins: ``registry``, those of ``NPU_KERNEL_REGISTRY``, the package."""
    named = [Path(registry)] if registry is not None else []
    named += [Path(p) for p in os.environ.get(ENV, "").split(os.pathsep) if p]
    return tuple(dict.fromkeys([*named, PACKAGED]))


_files: dict[Path, tuple[tuple[int, int], dict[tuple[int, ...], list[Row]]]] = {}


def _indexed(path: Path, op: str) -> dict[tuple[int, ...], list[Row]]:
    """Rows of a file by dimensions; parsed again only when the file has changed."""
    try:
        stat = path.stat()
    except OSError:
        return {}
    stamp = (stat.st_mtime_ns, stat.st_size)
    known = _files.get(path)
    if known is not None and known[0] == stamp:
        return known[1]
    index: dict[tuple[int, ...], list[Row]] = {}
    try:
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            index.setdefault(tuple(row["dims"][d] for d in DIMS[op]), []).append(row)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a kernel registry file ({error!r}); run: python -m kernel_registry check"
        ) from error
    _files[path] = (stamp, index)
    return index


def rows(op: str, dims: Mapping[str, int], registry: str | os.PathLike[str] | None = None) -> list[Row]:
    """All rows of a kernel at a shape, of every provenance, context and status."""
    key = tuple(dims[d] for d in DIMS[op])
    found: dict[str, Row] = {}
    for root in roots(registry):
        for row in _indexed(root / "details" / f"{op}.json", op).get(key, ()):
            found.setdefault(row["id"], row)
    return list(found.values())


def usable(row: Row) -> bool:
    """Whether a row can configure a kernel: it passed, stands alone and names its whole configuration."""
    tile = row.get("tile") or {}
    return (
        row["status"] in USABLE_STATUS
        and row["context"] in USABLE_CONTEXT
        and row.get("herd") is not None
        and all(k in tile for k in KERNELS[row["op"]].tile)
    )


def rank(row: Row) -> tuple[int, int, float, str]:
    """Order of choice among usable rows, best first: provenance, then latency in us, then id."""
    latency = (row.get("figures") or {}).get("latency_us")
    return PROVENANCES.index(row["provenance"]), latency is None, latency or 0.0, row["id"]


GEMM_METHODS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("bf16", "high"): ("drain", "fused-cast"),
    ("bf16", "low"): ("direct",),
    ("f32", "high"): ("external",),
}
"""(output dtype, precision) to methods: ``high`` casts once from f32, ``low`` rounds at every K step."""

DEFAULT_METHOD: Mapping[str, str] = {"rms_norm": "weighted", "rope": "half_split"}
"""What is meant where no method is named, of kernels whose methods compute different things."""


def config(
    op: str,
    *,
    method: str = "",
    output_dtype: str = "bf16",
    precision: str = "high",
    causal: bool = True,
    registry: str | os.PathLike[str] | None = None,
    **dims: int,
) -> KernelConfig:
    """The best usable row of a kernel at a shape, its dimensions (see ``DIMS``) by name.

    ``method`` restricts the implementation (of attention: the layout). ``output_dtype`` and ``precision``
    (``high`` or ``low``) choose the methods of a GEMM; ``causal`` concerns attention alone. Raises
    UnmeasuredShape; ValueError for an unknown kernel, wrong dimensions or a combination that no GEMM offers.
    """
    if set(dims) != set(DIMS.get(op, ())):
        wanted = f"dimensions {', '.join(DIMS[op])}" if op in DIMS else f"a kernel, one of {', '.join(DIMS)}"
        raise ValueError(f"config({op!r}, {', '.join(dims)}): the registry knows {wanted}")
    methods, options = _variant(op, method, output_dtype, precision, causal)
    candidates = [
        row
        for row in rows(op, dims, registry)
        if usable(row)
        and row.get("dtype_out", "bf16") == output_dtype
        and (not methods or row["method"] in methods)
        and (op != "flash_attention" or (row.get("attrs") or {}).get("causal") == causal)
    ]
    if not candidates:
        command = f"python -m kernel_registry sweep {op} {shape_of(op, dims)} {options}".rstrip()
        named = ", ".join(f"{d}={dims[d]}" for d in DIMS[op])
        raise UnmeasuredShape(op, named, options.replace("--", ""), command)
    row = min(candidates, key=rank)
    return KernelConfig(
        op=op,
        method=row["method"],
        tile=dict(row.get("tile") or {}),
        herd=(row["herd"][0], row["herd"][1]),
        attrs=dict(row.get("attrs") or {}),
        provenance=row["provenance"],
        row_id=row["id"],
        dims={d: dims[d] for d in DIMS[op]},
        latency_us=(row.get("figures") or {}).get("latency_us"),
        status=row["status"],
        used_by=tuple(str(tag) for tag in row.get("used_by") or ()),
        note=str(row.get("note") or ""),
    )


def _variant(
    op: str, method: str, output_dtype: str, precision: str, causal: bool
) -> tuple[tuple[str, ...], str]:
    """The methods that count (none: all) and what the command of a sweep needs beyond the shape."""
    if op == "gemm":
        try:
            methods = GEMM_METHODS[output_dtype, precision]
        except KeyError:
            known = "; ".join(f"{d} with {p}" for d, p in GEMM_METHODS)
            raise ValueError(
                f"no GEMM writes {output_dtype} with precision {precision!r}; known: {known}"
            ) from None
        options = [f"--precision {precision}" if output_dtype == "bf16" else f"--output-dtype {output_dtype}"]
    else:
        default = DEFAULT_METHOD.get(op, "")
        methods = (default,) if default else ()
        options = ["--causal"] if op == "flash_attention" and causal else []
    if method and method != DEFAULT_METHOD.get(op):
        return (method,), " ".join([*options, f"--method {method}"])
    return methods, " ".join(options)
