"""Command line of the validation."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from npu_twin.extensions import ExtensionMissing
from npu_twin.timing import models, rows
from npu_twin.validate import latency, numerics, plots, report

DEFAULT_FOLDER = Path("reports/twin")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m npu_twin.validate",
        description="Hold the twin against measured kernels and models. Exits 1 when a limit is missed.",
    )
    parser.add_argument("--rows", type=Path, help="kernel measurements (default: the published ones)")
    parser.add_argument("--models", type=Path, help="model measurements (default: the published ones)")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--output", type=Path, default=DEFAULT_FOLDER, help="folder for plots and tables")
    parser.add_argument(
        "--no-numerics", action="store_true", help="leave the error figures out (seconds, not minutes)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=min(4, os.cpu_count() or 1),
        help="processes for the error figures, about 3 GB each",
    )
    parser.add_argument("--docs", type=Path, help="document whose tables and plots are to be replaced")
    parser.add_argument("--verbose", action="store_true", help="list every row")
    return parser


def validate(
    rows_file: Path | None, models_file: Path | None, with_numerics: bool, processes: int
) -> report.Validation:
    """Run the validation.

    Raises:
        ValueError: naming a file that is not of the expected form.
        OSError: for a file that cannot be read.
    """
    records = rows.read_records(rows_file or rows.PUBLISHED_KERNELS)
    used, unjudged = rows.split(records)
    predictions = latency.shipped(used) if rows_file else latency.cross_validated(used)
    found = models.read_models(models_file or models.PUBLISHED_MODELS)
    folds = None if models_file else latency.cross_validated_models(found.records)
    return report.Validation(
        kernels=latency.judge_rows(used, unjudged, predictions, calibrated_on=rows_file is None),
        models=latency.judge_models(found, folds),
        numerics=numerics.judge(records, processes) if with_numerics else None,
        rows_label=str(rows_file) if rows_file else "published rows",
        models_label=str(models_file) if models_file else "published models",
        rows_cross_validated=rows_file is None,
        models_cross_validated=models_file is None,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Validate, print, write; return 1 when a limit is missed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        found = validate(options.rows, options.models, not options.no_numerics, max(1, options.processes))
    except ExtensionMissing as error:
        parser.error(f"{error}; --no-numerics leaves the error figures out")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(report.text(found, options.verbose))
    options.output.mkdir(parents=True, exist_ok=True)
    report.write_atomically(options.output / "tables.md", report.markdown(found))
    content = json.dumps(report.as_json(found), indent=1) + "\n"
    report.write_atomically(options.output / "validation.json", content)
    if options.json:
        report.write_atomically(options.json, content)
    if options.docs:
        try:
            text = report.refresh(options.docs.read_text(encoding="utf-8"), found)
        except (OSError, ValueError) as error:
            parser.error(f"{options.docs}: {error}")
        report.write_atomically(options.docs, text)
        plots.write(options.docs.with_suffix(""), found.kernels, found.models)
    files = plots.write(options.output, found.kernels, found.models)
    print(f"{options.output}: tables, results" + (f" and {len(files)} plots" if files else ""))
    return 1 if found.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
