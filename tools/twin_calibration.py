"""Fit the timing parameters of the twin anew: `python -m tools.twin_calibration [--check]`, in a clone."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from npu_twin.opset import Values
from npu_twin.timing import fit, models, parameters, rows
from npu_twin.validate.report import write_atomically


def fit_all(
    kernel_rows: Sequence[rows.Row], records: Sequence[models.ModelRecord]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return all parameters and the expected relative errors of a model's times.

    The latter are the largest errors that a model had when its figures were left out of the fit.
    """
    values = fit.fit_rows(kernel_rows)
    values.update(fit.fit_models(records, values))
    folds = fit.cross_validate_models(records, values)
    worst = {"ttft_s": 0.0, "decode_ms_per_token": 0.0}
    for record in records:
        ttft, decode = folds[record.id]
        if record.ttft_s:
            worst["ttft_s"] = max(worst["ttft_s"], abs(ttft / models.nearest(record.ttft_s, ttft) - 1.0))
        if record.decode_ms:
            error = abs(decode / models.nearest(record.decode_ms, decode) - 1.0)
            worst["decode_ms_per_token"] = max(worst["decode_ms_per_token"], error)
    return values, worst


def document(values: Values, expected: Mapping[str, float]) -> str:
    """Return the content of the parameter file."""
    fitted = {name for stage in fit.STAGES for name in stage.parameters} | set(fit.MODEL_PARAMETERS)
    content = {
        "title": "Physical parameters of the timing model of the digital twin",
        "written_by": "python -m tools.twin_calibration",
        "calibrated_on": f"{rows.PUBLISHED_KERNELS.name}, {models.PUBLISHED_MODELS.name}",
        "origin": "Xilinx/mlir-air e972f2942, snapshot 2026-08-22",
        "expected_error": {key: round(value, 3) for key, value in expected.items()},
        "parameters": [
            {
                "name": p.name,
                "value": float(f"{values[p.name]:.4g}") if p.name in fitted else p.start,
                "unit": p.unit,
                "meaning": p.meaning,
                "provenance": p.provenance,
            }
            for p in parameters.DEFINITIONS
        ],
    }
    return json.dumps(content, indent=1) + "\n"


def agrees(path: Path, text: str, tolerance: float = 5e-3) -> bool:
    """Return whether a parameter file holds the same parameters, up to what another platform rounds off."""
    if not path.exists():
        return False
    old = {str(p["name"]): float(p["value"]) for p in parameters.read_file(path)["parameters"]}
    new = {str(p["name"]): float(p["value"]) for p in json.loads(text)["parameters"]}
    return old.keys() == new.keys() and all(math.isclose(old[n], new[n], rel_tol=tolerance) for n in new)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit and write the parameter file; with `--check` only compare. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.twin_calibration", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument(
        "--rows", type=Path, default=rows.PUBLISHED_KERNELS, help="kernel measurements to fit on"
    )
    parser.add_argument(
        "--models", type=Path, default=models.PUBLISHED_MODELS, help="model figures to fit on"
    )
    parser.add_argument("--output", type=Path, default=parameters.DATA_FILE, help="parameter file to write")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a value would change"
    )
    options = parser.parse_args(arguments)
    try:
        kernel_rows, _ = rows.split(rows.read_records(options.rows))
        records = models.read_models(options.models).records
    except (OSError, ValueError) as error:
        parser.error(str(error))
    values, expected = fit_all(kernel_rows, records)
    text = document(values, expected)
    if options.check:
        same = agrees(options.output, text)
        print(f"{options.output}: {'up to date' if same else 'differs from a new fit'}")
        return 0 if same else 1
    write_atomically(options.output, text)
    print(f"{options.output}: {len(values)} parameters, {len(kernel_rows)} rows, {len(records)} models")
    return 0


if __name__ == "__main__":
    sys.exit(main())
