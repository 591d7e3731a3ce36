"""The validation as text, as JSON and as the tables of `docs/twin.md`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_twin.timing.exceptions import TABLE
from npu_twin.timing.parameters import DEFINITIONS, current
from npu_twin.validate import limits
from npu_twin.validate.latency import KernelResult, ModelsResult, RowResult
from npu_twin.validate.numerics import Judged, NumericsRow


@dataclass
class Validation:
    """Everything that one validation found."""

    kernels: Sequence[KernelResult]
    models: ModelsResult
    numerics: Judged | None
    rows_label: str
    models_label: str
    rows_cross_validated: bool
    models_cross_validated: bool
    extra_failures: list[str] = field(default_factory=list)

    def failures(self) -> list[str]:
        """Say every limit that is missed."""
        out = [text for kernel in self.kernels for text in kernel.failures()]
        if not any(k.counted for k in self.kernels) and not (self.numerics and self.numerics.rows):
            left = "" if self.numerics else "; error figures were left out"
            out.append(f"kernels: {self.rows_label} has no row that could be judged{left}")
        out += self.models.failures()
        if self.numerics is not None:
            out += self.numerics.failures()
        return out + self.extra_failures

    def numerics_of(self, name: str) -> list[NumericsRow]:
        """The rows with figures of a kernel or family."""
        if self.numerics is None:
            return []
        return [r for r in self.numerics.rows if name in (_op(r.kernel), limits.FAMILIES.get(_op(r.kernel)))]


def _op(kernel: str) -> str:
    return {"rmsnorm": "rms_norm", "layernorm": "layer_norm"}.get(kernel, kernel)


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    cells = [list(header), *[list(line) for line in lines]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    out = []
    for index, row in enumerate(cells):
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        out.append("  ".join(padded).rstrip())
        if index == 0:
            out.append("  ".join("-" * w for w in widths))
    return out


KERNEL_HEADER = ("kernel", "rows", "shapes", "numerics", "median", "p90", "worst", "limit", "verdict")


def kernel_lines(validation: Validation) -> list[tuple[str, ...]]:
    """One line for each kernel or family."""
    out: list[tuple[str, ...]] = []
    for kernel in validation.kernels:
        found = validation.numerics_of(kernel.name)
        reproduced = f"{sum(r.reproduced for r in found)}/{len(found)}" if found else "-"
        worst = max((r.judged_error for r in kernel.counted), default=0.0)
        verdict = "-" if not kernel.judged else "missed" if kernel.failures() else "kept"
        out.append(
            (
                kernel.name if kernel.judged else f"  {kernel.name}",
                str(len(kernel.counted)),
                str(kernel.shapes),
                reproduced,
                f"{kernel.quantile(0.5):.1%}",
                f"{kernel.quantile(0.9):.1%}",
                f"{worst:.1%}",
                kernel.limit_text,
                verdict,
            )
        )
    return out


MODEL_HEADER = ("model", "quantity", "predicted", "published", "error")


def model_lines(models: ModelsResult) -> list[tuple[str, ...]]:
    """Two lines for each model."""
    out: list[tuple[str, ...]] = []
    for result in models.results:
        for quantity, (predicted, published, count) in result.figures().items():
            note = f" (nearest of {count})" if count > 1 else ""
            out.append(
                (
                    result.record.id,
                    quantity,
                    f"{predicted:.4g}",
                    f"{published:.4g}{note}",
                    f"{predicted / published - 1.0:+.1%}",
                )
            )
    return out


def text(validation: Validation, verbose: bool = False) -> str:
    """Return the report for the terminal."""
    how = "cross-validated" if validation.rows_cross_validated else "parameters as shipped"
    out = [f"Kernel latency and numerics: {validation.rows_label}; latency {how}", ""]
    out += _table(KERNEL_HEADER, kernel_lines(validation))
    if validation.numerics is None:
        out += ["", "numerics: not computed (--no-numerics)"]
    judged = [k for k in validation.kernels if k.judged]
    results = [r for k in judged for r in k.results]
    out += _named(
        "Not judged, no formula explains them (entries of the table of exceptions):",
        [(r.row.id, r.excepted) for r in results if r.excepted],
    )
    out += _named(
        "Judged like all, but in no fit:",
        [(r.row.id, r.doubt) for r in results if r.doubt],
    )
    out += _named(
        "Not judged, no time or no claim of the model:",
        [(u.id, u.reason) for k in judged for u in k.unjudged if u.excused],
    )
    notes = [
        r for r in (validation.numerics.rows if validation.numerics else []) if not r.reproduced and r.excuse
    ]
    if notes:
        out += ["", "Figures not reproduced, with the reason:"]
        out += [f"  {r.id} ({r.kernel}): {r.excuse}; {'; '.join(r.misses)}" for r in notes]
    how = "each model left out of the fit" if validation.models_cross_validated else "parameters as shipped"
    out += ["", f"Models: {validation.models_label}; {how}", ""]
    out += _table(MODEL_HEADER, model_lines(validation.models))
    if validation.models.left_out:
        out += ["", "Models left out:"]
        out += [f"  {identity}: {reason}" for identity, reason in validation.models.left_out]
        out.append("")
    for quantity, limit in limits.MODEL_MEDIAN.items():
        known = any(quantity in result.figures() for result in validation.models.results)
        median = f"{validation.models.median(quantity):.1%}" if known else "no figure"
        out.append(f"median error of {quantity}: {median} (limit {limit:.0%})")
    if verbose:
        out += ["", "Rows:"] + [_row_line(r) for k in validation.kernels if k.judged for r in k.results]
    failures = validation.failures()
    out += ["", *(f"MISSED  {f}" for f in failures)]
    out.append("all limits are kept" if not failures else f"{len(failures)} limits are missed")
    return "\n".join(out)


def _named(title: str, items: Sequence[tuple[str, str]]) -> list[str]:
    """Return `title` and one line for each reason with the ids it holds for; nothing without items."""
    if not items:
        return []
    reasons = dict.fromkeys(reason for _, reason in items)
    return ["", title, *(f"  {', '.join(i for i, r in items if r == why)}: {why}" for why in reasons)]


def _row_line(result: RowResult) -> str:
    row = result.row
    what = f"{row.id} {row.kernel} {row.sizes} {row.call.method} {row.scope}"
    times = f"measured {row.measured_us:.1f} us, predicted {result.predicted_us:.1f} us"
    return f"  {what}: {times}, {result.error:+.1%}"


def as_json(validation: Validation) -> dict[str, Any]:
    """Return the report as plain data."""
    p = current()
    return {
        "rows": validation.rows_label,
        "models": validation.models_label,
        "rows_cross_validated": validation.rows_cross_validated,
        "models_cross_validated": validation.models_cross_validated,
        "clock": "twin (modelled)",
        "passed": not validation.failures(),
        "failures": validation.failures(),
        "kernels": [_kernel_json(k, validation) for k in validation.kernels],
        "model_results": [
            {
                "id": r.record.id,
                "seconds_to_predict": r.seconds,
                **{
                    q: {"predicted": a, "published": b, "error": a / b - 1.0}
                    for q, (a, b, _) in r.figures().items()
                },
            }
            for r in validation.models.results
        ],
        "models_not_judged": [{"id": i, "reason": r} for i, r in validation.models.unjudged],
        "models_left_out": [{"id": i, "reason": r} for i, r in validation.models.left_out],
        "model_medians": {q: validation.models.median(q) for q in limits.MODEL_MEDIAN},
        "parameters": {
            d.name: {"value": p[d.name], "unit": d.unit, "provenance": d.provenance} for d in DEFINITIONS
        },
        "exceptions": [{"op": e.op, "factor": e.factor, "reason": e.reason} for e in TABLE],
        "numerics_seconds": validation.numerics.seconds if validation.numerics else None,
    }


def _kernel_json(kernel: KernelResult, validation: Validation) -> dict[str, Any]:
    numerics = validation.numerics_of(kernel.name)
    return {
        "kernel": kernel.name,
        "judged": kernel.judged,
        "rows": len(kernel.counted),
        "shapes": kernel.shapes,
        "median_error": kernel.quantile(0.5),
        "p90_error": kernel.quantile(0.9),
        "worst_error": max((r.judged_error for r in kernel.counted), default=0.0),
        "limit": kernel.limit_text,
        "failures": kernel.failures(),
        "numerics": {
            "rows": len(numerics),
            "reproduced": sum(r.reproduced for r in numerics),
            "not_reproduced": [
                {"id": r.id, "misses": list(r.misses), "excuse": r.excuse}
                for r in numerics
                if not r.reproduced
            ],
        },
        "latency": [
            {
                "id": r.row.id,
                "kernel": r.row.kernel,
                "dims": r.row.call.dims,
                "method": r.row.call.method,
                "tile": r.row.call.tile,
                "herd": list(r.row.call.herd),
                "scope": r.row.scope,
                "assumed_tile": r.row.assumed_tile,
                "measured_us": r.row.measured_us,
                "predicted_us": r.predicted_us,
                "error": r.error,
                "excepted": r.excepted,
                "doubt": r.doubt,
            }
            for r in kernel.results
        ],
        "not_judged": [{"id": u.id, "reason": u.reason, "excused": u.excused} for u in kernel.unjudged],
    }


def tables(validation: Validation) -> dict[str, str]:
    """Return the tables for the documentation by name.

    They are kernels, models, parameters, exceptions, rules and deviations, and figures when error figures
    were computed.
    """
    p = current()
    lines = [(f"`{d.name}`", f"{p[d.name]:.4g}", d.unit, d.meaning, d.provenance) for d in DEFINITIONS]
    entries = [
        (e.op, _match(e.dims, e.tile), f"{e.factor:g}", "yes" if e.judged else "no", e.reason) for e in TABLE
    ]
    return {
        "kernels": _markdown_table(KERNEL_HEADER, kernel_lines(validation)),
        "models": _markdown_table(MODEL_HEADER, model_lines(validation.models)),
        "parameters": _markdown_table(("parameter", "value", "unit", "meaning", "provenance"), lines),
        "exceptions": _markdown_table(("kernel", "where", "factor", "judged without it", "reason"), entries),
        **_figures_table(validation),
        "rules": _rules_table(),
        "deviations": _deviations_table(),
    }


def _figures_table(validation: Validation) -> dict[str, str]:
    """The published error figures that are not reproduced; nothing when none were computed."""
    if validation.numerics is None:
        return {}
    rows = [
        (r.id, _op(r.kernel), "; ".join(r.misses), r.excuse or "none: a miss")
        for r in validation.numerics.rows
        if not r.reproduced
    ]
    return {"figures": _markdown_table(("row", "kernel", "twin against published", "reason"), rows)}


def _rules_table() -> str:
    from npu_twin.constraints.rules import RULES

    lines = [
        (rule.id, rule.title, rule.shows_as, ", ".join(rule.ops).replace("*", "all"), rule.enforcement)
        for rule in RULES.values()
    ]
    return _markdown_table(("rule", "what must hold", "shows as", "kernels", "kind"), lines)


def _deviations_table() -> str:
    path = Path(__file__).resolve().parent.parent / "deviations.json"
    entries = json.loads(path.read_text(encoding="utf-8"))["deviations"]
    lines = [(e["id"], e["call"], e["real"], e["twin"]) for e in entries]
    return _markdown_table(("deviation", "call", "library", "twin"), lines)


def markdown(validation: Validation) -> str:
    """Return all tables, one after the other."""
    return "\n\n".join(tables(validation).values()) + "\n"


def refresh(document: str, validation: Validation) -> str:
    """Return a document with its tables replaced: what stands between `<!-- name -->` and `<!-- /name -->`.

    Raises ValueError naming a table whose marks are missing.
    """
    for name, table in tables(validation).items():
        opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
        if opening not in document or closing not in document:
            raise ValueError(f"the document has no {opening} ... {closing}")
        head, rest = document.split(opening, 1)
        document = f"{head}{opening}\n{table}\n{closing}{rest.split(closing, 1)[1]}"
    return document


def _match(dims: Any, tile: Any) -> str:
    return ", ".join(f"{k} = {v}" for k, v in {**dims, **tile}.items())


def _markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    out = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    escaped = (" | ".join(cell.strip().replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join([*out, *(f"| {line} |" for line in escaped)])


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path` in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
