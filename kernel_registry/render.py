"""Pages of the registry, written from the JSON alone: one per kernel and the overview."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_registry import store
from kernel_registry.registry_lookup import DIMS, KERNELS, PROVENANCES, rank, shape_of, usable

_HEADER = "<!-- Written by `python -m kernel_registry render` from the JSON files; do not edit. -->\n"
_MARK = {
    "published-silicon": "published silicon",
    "measured-silicon": "measured silicon",
    "twin": "twin (modelled)",
}


_COLUMNS = (
    "shape", "method", "tier", "tile", "herd", "latency us", "mean_rel_L1", "abs_err_max", "rtol / atol",
    "status", "used by", "date",
)  # fmt: skip


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *rows)]
    return [lines[0], "|" + "---|" * len(columns), *lines[1:], ""]


def _shape(row: Mapping[str, Any]) -> str:
    return shape_of(row["op"], row["dims"])


def _number(value: Any, pattern: str = "{:g}") -> str:
    return "" if value is None else pattern.format(value)


def _tile(row: Mapping[str, Any]) -> str:
    parts = [f"{k}={v}" for k, v in (row.get("tile") or {}).items()]
    parts += [k if v is True else f"{k}={v}" for k, v in (row.get("attrs") or {}).items() if v is not False]
    return ", ".join(parts)


def _herd(row: Mapping[str, Any]) -> str:
    herd = row.get("herd")
    return f"{herd[0]}x{herd[1]}" if herd else ""


def _cells(row: Mapping[str, Any]) -> list[str]:
    figures = row["figures"]
    status = row["status"] if not row.get("error") else f"{row['status']}: {row['error']}"
    latency = _number(figures.get("latency_us"), "{:.1f}")
    if figures.get("latency_estimated"):
        latency += " (taken over)"
    tolerance = row.get("tolerance")
    return [
        _shape(row),
        row["method"] + (" f32" if row.get("dtype_out") == "f32" else ""),
        row.get("tier", ""),
        _tile(row),
        _herd(row),
        latency,
        _number(figures.get("mean_rel_L1"), "{:.3g}"),
        _number(figures.get("abs_err_max"), "{:.3g}"),
        f"{tolerance['rtol']:g} / {tolerance['atol']:g}" if tolerance else "",
        status,
        ", ".join(row.get("used_by", ())),
        row["date"],
    ]


def kernel_page(op: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Page of one kernel: its rows by provenance and context."""
    lines = [_HEADER, f"# {KERNELS[op].title}\n"]
    lines.append(f"Shape: `{'x'.join(DIMS[op])}`. {len(rows)} rows.\n")
    for provenance in PROVENANCES:
        contexts = dict.fromkeys(r["context"] for r in rows if r["provenance"] == provenance)
        for context in contexts:
            chosen = [r for r in rows if (r["provenance"], r["context"]) == (provenance, context)]
            lines.append(f"## {_MARK[provenance]}: {context.replace('_', ' ')}\n")
            lines += _table(_COLUMNS, map(_cells, chosen))
            notes = sorted({f"- {_shape(r)} {r['method']}: {r['note']}" for r in chosen if r.get("note")})
            if notes:
                lines += ["Notes:", "", *notes, ""]
    sources = sorted({r["source"] for r in rows})
    lines += ["## Sources", "", *[f"- {s}" for s in sources], ""]
    return "\n".join(lines)


def overview_page(everything: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Overview: rows per kernel and provenance, then the usable shapes of every kernel."""
    lines = [_HEADER, "# Supported kernels\n"]
    lines.append(
        "A shape is supported when a row of it passed. Figures of the twin are modelled, never measured.\n"
    )
    heads = ["kernel", *(_MARK[p] for p in PROVENANCES), "not passing"]
    counted = []
    for op, rows in everything.items():
        counts = [sum(usable(r) and r["provenance"] == p for r in rows) for p in PROVENANCES]
        failing = sum(r["status"] not in ("pass", "in_tier") for r in rows)
        counted.append([f"[{KERNELS[op].title}](details/{op}.md)", *map(str, counts), str(failing)])
    lines += _table(heads, counted)
    for op, rows in everything.items():
        best: dict[tuple[str, ...], Mapping[str, Any]] = {}
        for row in filter(usable, rows):
            causal = " causal" if (row.get("attrs") or {}).get("causal") else ""
            variant = (_shape(row) + causal, row.get("dtype_out", "bf16"), row.get("tier", ""))
            best[variant] = min(row, best.get(variant, row), key=rank)
        if best:
            lines += [f"## {KERNELS[op].title}\n", *_table(_BEST, map(_best_cells, best, best.values()))]
    return "\n".join(lines)


_BEST = ("shape", "output", "tier", "method", "herd", "latency us", "from", "used by")


def _best_cells(variant: tuple[str, ...], row: Mapping[str, Any]) -> list[str]:
    latency = _number(row["figures"].get("latency_us"), "{:.1f}")
    tags = ", ".join(row.get("used_by", ()))
    return [*variant, row["method"], _herd(row), latency, _MARK[row["provenance"]], tags]


def pages(root: Path) -> dict[Path, str]:
    """Every page of a registry with its text. Raises RegistryError when a JSON file is wrong."""
    everything = store.read_all(root)
    texts = {root / "details" / f"{op}.md": kernel_page(op, rows) for op, rows in everything.items()}
    return {**texts, root / "supported_kernels.md": overview_page(everything)}


def render(root: Path) -> list[Path]:
    """Write the pages that differ, under the registry's lock; the paths that changed."""
    with store.locked(root):
        return [path for path, text in pages(root).items() if store.write_text(path, text)]


def drift(root: Path) -> list[str]:
    """Sentences about pages that are missing, changed by hand or left behind by a deleted kernel."""
    expected = pages(root)
    problems = []
    for path, text in expected.items():
        if not path.exists():
            problems.append(f"{path}: missing")
        elif path.read_text(encoding="utf-8") != text:
            problems.append(f"{path}: differs from the JSON files")
    problems += [
        f"{path}: page of a kernel without rows"
        for path in (root / "details").glob("*.md")
        if path not in expected
    ]
    return problems
