"""The conformance rows as objects, and the judgement of one row: twin against real pyxrt.

A row may carry a deviation of `npu_twin/deviations.json` and a pattern of what the twin gives instead.
Everything else must be the same text: value with type, exception with text, or the way the process ended.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]
ROWS = FOLDER / "rows"
PROBE = FOLDER / "tools" / "probe.py"
RECORDED = FOLDER / "recorded" / "xrt-2.25.0.json"
PROJECT = FOLDER.parents[1]

Outcomes = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Row:
    """One line of Python; `deviation` is empty where the twin must give the same as the real library."""

    group: str
    code: str
    deviation: str = ""
    pattern: str = ""

    @property
    def id(self) -> str:
        """Name of the row in test ids."""
        return f"{self.group}: {self.code}"


def load_rows(folder: Path = ROWS) -> list[Row]:
    """Read all rows. Raises ValueError for a row that is there twice or a deviation without a pattern."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*.rows")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path.name}:{number}"
            if line.startswith("    ~ "):
                deviation, bar, pattern = line[6:].partition(" | ")
                if not bar or not rows or rows[-1].deviation:
                    raise ValueError(f"{where}: expected '    ~ DEVIATION | PATTERN' after a row")
                rows[-1] = Row(rows[-1].group, rows[-1].code, deviation.strip(), pattern)
            elif line.strip() and not line.startswith(("#", "!")):
                rows.append(Row(path.stem, line))
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if (row.group, row.code) in seen:
            raise ValueError(f"{row.id}: the row is there twice")
        seen.add((row.group, row.code))
    return rows


def deviation_ids() -> set[str]:
    """Names of the listed deviations."""
    text = resources.files("npu_twin").joinpath("deviations.json").read_text(encoding="utf-8")
    return {entry["id"] for entry in json.loads(text)["deviations"]}


def judge(row: Row, real: Outcomes, twin: Outcomes, listed: set[str]) -> str:
    """Why a row fails, or the empty string."""
    expected, found = real[row.group].get(row.code), twin[row.group].get(row.code)
    if expected is None or found is None:
        missing = "the real pyxrt's" if expected is None else "the twin's"
        return f"{row.id}\n  has no outcome on {missing} side: record or run it again"
    if not row.deviation:
        return "" if expected == found else f"{row.id}\n  real: {expected}\n  twin: {found}"
    if row.deviation not in listed:
        return (
            f"{row.id}\n  names the deviation '{row.deviation}', which npu_twin/deviations.json does not list"
        )
    if found != expected and not re.fullmatch(row.pattern, found, re.DOTALL):
        return (
            f"{row.id}\n  real: {expected}\n  twin: {found}\n"
            f"  deviation '{row.deviation}' promises: {row.pattern}"
        )
    return ""


def summary(rows: list[Row], real: Outcomes, twin: Outcomes, against: str) -> str:
    """The count that is printed after a run."""
    differing = [row for row in rows if real[row.group].get(row.code) != twin[row.group].get(row.code)]
    used = sorted({row.deviation for row in differing if row.deviation})
    return (
        f"conformance: {len(rows)} rows against {against}: {len(rows) - len(differing)} equal, "
        f"{sum(bool(row.deviation) for row in differing)} differ as listed ({', '.join(used)}), "
        f"{sum(not row.deviation for row in differing)} differ unlisted"
    )


def twin_outcomes(rows: Path = ROWS, *, prelude: str = "") -> Outcomes:
    """Run the rows on the twin, in processes of this interpreter.

    `prelude` is Python that runs first: tests plant a defect in the twin with it.
    """
    script = f"import runpy; {prelude}\nrunpy.run_path({str(PROBE)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", script, "npu_twin.pyxrt", "-", str(rows)],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the probe failed on the twin:\n{done.stderr}")
    groups: Outcomes = json.loads(done.stdout)["groups"]
    return groups


def recorded_outcomes() -> Outcomes:
    """What the real pyxrt gave when the rows were recorded."""
    groups: Outcomes = json.loads(RECORDED.read_text(encoding="utf-8"))["groups"]
    return groups
