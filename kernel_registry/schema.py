"""Schema of the registry's JSON files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kernel_registry.registry_lookup import DIMS, KERNELS, shape_of

VERSION = 1
Status = Literal["pass", "in_tier", "compile_fail", "runtime_fail", "hang", "silent_corruption"]
"""``in_tier``: the arithmetic is as good as its tier, but some elements exceed the gate's tolerance."""
Context = Literal[
    "standalone", "tile_sweep", "herd_sweep", "failure", "in_situ", "session", "driver_comparison"
]
"""``standalone``: the kernel's own harness; ``in_situ``: inside a fused ELF of a model; ``session`` and
``driver_comparison``: repeated under other conditions, not comparable with the rest.
"""
_Size = Annotated[int, Field(ge=1)]
_Cores = Annotated[int, Field(ge=1, le=8)]
_Error = Annotated[float | None, Field(ge=0)]
_Time = Annotated[float | None, Field(gt=0)]


class RegistryError(ValueError):
    """A registry file or row is wrong. The message names file, row and field."""


def row_id(row: Mapping[str, Any]) -> str:
    """Identity of a row, derived from what was measured, how it was configured and where."""
    op = str(row["op"])
    sizes = row.get("tile") or {}
    order = KERNELS[op].tile
    keys = [k for k in order if k in sizes] + sorted(k for k in sizes if k not in order)
    tile = ".".join(str(sizes[k]) for k in keys) or "-"
    herd = "x".join(map(str, row.get("herd") or ())) or "-"
    attrs = row.get("attrs") or {}
    flags = [k if v is True else f"{k}={v}" for k, v in sorted(attrs.items()) if v is not False]
    parts = [op, shape_of(op, row["dims"]), row.get("dtype_out", "bf16"), row["method"], tile]
    parts += [herd, *flags, row["context"], row["provenance"]]
    if row.get("repeat", 1) > 1:
        parts.append(f"repeat{row['repeat']}")
    return ":".join(map(str, parts))


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Figures(_Strict):
    """Measured or modelled figures of one row."""

    latency_us: _Time = None
    latency_us_max: _Time = None
    latency_estimated: bool | None = None
    gflops: _Error = None
    gbps: _Error = None
    mean_rel_L1: _Error = None  # noqa: N815 - the metric's published name
    rel_err_max: _Error = None
    abs_err_max: _Error = None
    elements_over: int | None = Field(None, ge=0)


class Tolerance(_Strict):
    """Gate: every element within atol + rtol*|reference|."""

    rtol: float = Field(gt=0)
    atol: float = Field(gt=0)


class RowModel(_Strict):
    """One row."""

    id: str
    op: str
    dims: dict[str, _Size]
    dtype_in: Literal["bf16"] = "bf16"
    dtype_out: Literal["bf16", "f32"] = "bf16"
    method: str = Field(min_length=1)
    tier: str | None = None
    tile: dict[str, _Size] = Field(default_factory=dict)
    herd: list[_Cores] | None = Field(None, min_length=2, max_length=2)
    attrs: dict[str, int | bool | str] = Field(default_factory=dict)
    conditions: dict[str, int | float | str] = Field(default_factory=dict)
    context: Context
    status: Status
    error: str | None = None
    provenance: Literal["published-silicon", "measured-silicon", "twin"]
    figures: Figures
    tolerance: Tolerance | None = None
    used_by: list[str] = Field(default_factory=list)
    date: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")
    source: str = Field(min_length=1)
    note: str | None = None
    repeat: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> RowModel:
        if self.op not in DIMS:
            raise ValueError(f"unknown operation {self.op!r}")
        if set(self.dims) != set(DIMS[self.op]):
            raise ValueError(f"dims must be {', '.join(DIMS[self.op])}")
        if self.status in ("pass", "in_tier") and self.error:
            raise ValueError("a row that passed has no error")
        expected = row_id(self.model_dump())
        if self.id != expected:
            raise ValueError(f"id must be {expected!r}, derived from the row's content")
        return self


def validate_row(row: Mapping[str, Any], where: str = "row") -> dict[str, Any]:
    """The row with only the fields that are set, in the order of the schema. Raises RegistryError."""
    try:
        model = RowModel.model_validate(dict(row))
    except ValidationError as error:
        raise RegistryError(f"{where}: {'; '.join(map(_problem, error.errors()))}") from None
    full = model.model_dump(exclude_none=True)
    absent = {"repeat": 1, "conditions": {}, "attrs": {}}
    return {key: value for key, value in full.items() if key not in absent or value != absent[key]}


def _problem(error: Any) -> str:
    field = ".".join(map(str, error["loc"])) or "row"
    value = f" {error['input']!r}" if isinstance(error["input"], (str, int, float)) else ""
    return f"{field}{value}: {error['msg'].removeprefix('Value error, ')}"


def validate_file(data: Any, path: Path) -> list[dict[str, Any]]:
    """All rows of one file's JSON object. Raises RegistryError naming file, row and field."""
    if not isinstance(data, Mapping) or not isinstance(data.get("rows"), list):
        raise RegistryError(f"{path}: must be an object with a list 'rows'")
    if data.get("schema") != VERSION:
        raise RegistryError(f"{path}: schema {data.get('schema')!r} cannot be read here, only {VERSION}")
    op = data.get("op")
    if op != path.stem or op not in DIMS:
        raise RegistryError(f"{path}: op {op!r} must be the file's name and a known operation")
    checked: dict[str, dict[str, Any]] = {}
    for i, row in enumerate(data["rows"]):
        where = f"{path}: rows[{i}]"
        if not isinstance(row, Mapping):
            raise RegistryError(f"{where}: must be an object")
        if row.get("op") != op:
            raise RegistryError(f"{where}: op {row.get('op')!r} belongs into {row.get('op')}.json")
        valid = validate_row(row, f"{where} ({row.get('id', 'no id')})")
        if valid["id"] in checked:
            raise RegistryError(f"{where}: duplicate of row {valid['id']}")
        checked[valid["id"]] = valid
    return list(checked.values())
