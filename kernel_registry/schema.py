"""Schema of the registry's JSON files, checked with pydantic (imported only when a file is judged)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernel_registry.registry_lookup import DIMS, KERNELS, PROVENANCES

VERSION = 1
STATUSES = (
    "pass",
    "in_tier",
    "compile_fail",
    "runtime_fail",
    "hang",
    "silent_corruption",
)
"""``in_tier``: the arithmetic is as good as its tier, but some elements exceed the gate's tolerance."""
CONTEXTS = ("standalone", "tile_sweep", "herd_sweep", "failure", "in_situ", "session", "driver_comparison")
"""``standalone``: the kernel's own harness; ``in_situ``: inside a fused ELF of a model; ``session`` and
``driver_comparison``: repeated under other conditions, not comparable with the rest.
"""


class RegistryError(ValueError):
    """A registry file or row is wrong. The message names file, row and field."""


def row_id(row: Mapping[str, Any]) -> str:
    """Identity of a row, derived from what was measured, how it was configured and where."""
    op = str(row["op"])
    shape = "x".join(str(row["dims"][d]) for d in DIMS[op])
    sizes = row.get("tile") or {}
    order = KERNELS[op].tile
    keys = [k for k in order if k in sizes] + sorted(k for k in sizes if k not in order)
    tile = ".".join(str(sizes[k]) for k in keys) or "-"
    herd = "x".join(map(str, row.get("herd") or ())) or "-"
    attrs = row.get("attrs") or {}
    flags = [k if v is True else f"{k}={v}" for k, v in sorted(attrs.items()) if v is not False]
    parts = [op, shape, row.get("dtype_out", "bf16"), row["method"], tile]
    parts += [herd, *flags, row["context"], row["provenance"]]
    if row.get("repeat", 1) > 1:
        parts.append(f"repeat{row['repeat']}")
    return ":".join(map(str, parts))


@lru_cache(maxsize=1)
def _model() -> Any:
    from typing import Literal

    from pydantic import BaseModel, ConfigDict, Field, model_validator

    class Figures(BaseModel):
        """Measured or modelled figures of one row."""

        model_config = ConfigDict(extra="forbid", strict=True)
        latency_us: float | None = Field(None, gt=0)
        latency_us_max: float | None = Field(None, gt=0)
        latency_estimated: bool | None = None
        gflops: float | None = Field(None, ge=0)
        gbps: float | None = Field(None, ge=0)
        mean_rel_L1: float | None = Field(None, ge=0)  # noqa: N815 - the metric's published name
        rel_err_max: float | None = Field(None, ge=0)
        abs_err_max: float | None = Field(None, ge=0)
        elements_over: int | None = Field(None, ge=0)

    class Tolerance(BaseModel):
        """Gate: every element within atol + rtol*|reference|."""

        model_config = ConfigDict(extra="forbid", strict=True)
        rtol: float = Field(gt=0)
        atol: float = Field(gt=0)

    class RowModel(BaseModel):
        """One row."""

        model_config = ConfigDict(extra="forbid", strict=True)
        id: str
        op: str
        dims: dict[str, int]
        dtype_in: Literal["bf16"] = "bf16"
        dtype_out: Literal["bf16", "f32"] = "bf16"
        method: str = Field(min_length=1)
        tier: str | None = None
        tile: dict[str, int] = Field(default_factory=dict)
        herd: list[int] | None = Field(None, min_length=2, max_length=2)
        attrs: dict[str, int | bool | str] = Field(default_factory=dict)
        conditions: dict[str, int | float | str] = Field(default_factory=dict)
        context: str
        status: str
        error: str | None = None
        provenance: str
        figures: Figures
        tolerance: Tolerance | None = None
        used_by: list[str] = Field(default_factory=list)
        date: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")
        source: str = Field(min_length=1)
        note: str | None = None
        repeat: int = Field(1, ge=1)

        @model_validator(mode="after")
        def _consistent(self) -> Any:
            if self.op not in DIMS:
                raise ValueError(f"unknown operation {self.op!r}")
            if set(self.dims) != set(DIMS[self.op]):
                raise ValueError(f"dims must be {', '.join(DIMS[self.op])}")
            for name, value, known in (
                ("status", self.status, STATUSES),
                ("context", self.context, CONTEXTS),
                ("provenance", self.provenance, PROVENANCES),
            ):
                if value not in known:
                    raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")
            if any(v < 1 for v in [*self.dims.values(), *self.tile.values(), *(self.herd or [])]):
                raise ValueError("dims, tile and herd are positive")
            if self.herd and (self.herd[0] > 8 or self.herd[1] > 8):
                raise ValueError(f"herd {self.herd} is larger than the array")
            if self.status in ("pass", "in_tier") and self.error:
                raise ValueError("a row that passed has no error")
            expected = row_id(self.model_dump())
            if self.id != expected:
                raise ValueError(f"id must be {expected!r}, derived from the row's content")
            return self

    return RowModel


def validate_row(row: Mapping[str, Any], where: str = "row") -> dict[str, Any]:
    """The row with only the fields that are set, in the order of the schema. Raises RegistryError."""
    from pydantic import ValidationError

    try:
        model = _model().model_validate(dict(row))
    except ValidationError as error:
        details = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'row'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        )
        raise RegistryError(f"{where}: {details}") from None
    full: dict[str, Any] = model.model_dump(exclude_none=True)
    if full["repeat"] == 1:
        del full["repeat"]
    for key in ("conditions", "attrs"):
        if not full[key]:
            del full[key]
    return full


def validate_file(data: Any, path: Path) -> list[dict[str, Any]]:
    """All rows of one file's JSON object. Raises RegistryError naming file, row and field."""
    if not isinstance(data, Mapping) or not isinstance(data.get("rows"), list):
        raise RegistryError(f"{path}: must be an object with a list 'rows'")
    if data.get("schema") != VERSION:
        raise RegistryError(f"{path}: schema {data.get('schema')!r} cannot be read here, only {VERSION}")
    op = data.get("op")
    if op != path.stem or op not in DIMS:
        raise RegistryError(f"{path}: op {op!r} must be the file's name and a known operation")
    checked = []
    seen: set[str] = set()
    for i, row in enumerate(data["rows"]):
        where = f"{path}: rows[{i}]"
        if not isinstance(row, Mapping):
            raise RegistryError(f"{where}: must be an object")
        if row.get("op") != op:
            raise RegistryError(f"{where}: op {row.get('op')!r} belongs into {row.get('op')}.json")
        checked.append(validate_row(row, f"{where} ({row.get('id', 'no id')})"))
        if checked[-1]["id"] in seen:
            raise RegistryError(f"{where}: duplicate of row {checked[-1]['id']}")
        seen.add(checked[-1]["id"])
    return checked
