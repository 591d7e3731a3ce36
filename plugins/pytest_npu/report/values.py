"""Values out of records, read leniently: a newer gate's record costs a cell, not the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: What a column shows of a record: a key, a key and decimal places, or a function.
Field = str | tuple[str, int] | Callable[[Mapping[str, Any]], Any]


def number(value: Any) -> float | None:
    """A finite float, or None for missing values and for the texts `nan` and `inf` of the event log."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def digits(value: Any, places: int, missing: str = "–") -> str:
    """A number with decimal places."""
    plain = number(value)
    return missing if plain is None else f"{plain:.{places}f}"


def short(value: Any, missing: str = "–") -> str:
    """A number with three significant digits."""
    plain = number(value)
    return missing if plain is None else f"{plain:.3g}"


def dicts(value: Any) -> list[dict[str, Any]]:
    """The entries of a list that are objects."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


@dataclass(frozen=True)
class Table:
    """A table of a report; every cell is a text."""

    title: str
    note: str
    columns: Sequence[str]
    rows: list[list[str]]


def table(title: str, note: str, columns: Sequence[Any], rows: Iterable[Iterable[Any]]) -> Table:
    """Cells as texts: nothing for None, six significant digits of a float."""
    return Table(title, note, [str(column) for column in columns], [list(map(_cell, row)) for row in rows])


def table_of(
    title: str, note: str, records: Iterable[Mapping[str, Any]], fields: Mapping[str, Field]
) -> Table:
    """A row per record; `fields` says by column what it shows."""
    return table(
        title, note, [*fields], [[_shown(one, field) for field in fields.values()] for one in records]
    )


def _shown(record: Mapping[str, Any], field: Field) -> Any:
    if isinstance(field, tuple):
        return digits(record.get(field[0]), field[1], missing="")
    return record.get(field) if isinstance(field, str) else field(record)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
