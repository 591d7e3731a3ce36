"""``python -m npu_twin.faults list [--json]``: the catalogue."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from npu_twin.faults import STAGES, UNPLANTED, load


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m npu_twin.faults", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="show all faults")
    listing.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    content = catalogue()
    print(json.dumps(content, indent=1) if options.json else _text(content))
    return 0


def catalogue() -> dict[str, Any]:
    """``faults``: [{name, entry, kind, expected, where, what, origin}], ``unplanted``: [{entry, ...}]."""
    keys = ("name", "entry", "kind", "expected", "where", "what", "origin")
    return {
        "faults": [{key: getattr(fault, key) for key in keys} for fault in load()],
        "unplanted": [
            {key: getattr(one, key) for key in ("entry", "what", "reason", "guard")} for one in UNPLANTED
        ],
    }


def _text(content: dict[str, Any]) -> str:
    rows = sorted(content["faults"], key=lambda row: STAGES.index(row["expected"]))
    wide = max(len(row["name"]) for row in rows)
    lines = [f"{'fault':{wide}}  entry  stage    kind     what (where it applies)"]
    for row in rows:
        where = "" if row["where"] == "every model" else f" ({row['where']})"
        lines.append(
            f"{row['name']:{wide}}  {row['entry'] or '-':5}  {row['expected']:7}  {row['kind']:7}  "
            f"{row['what']}{where}"
        )
    lines += ["", "without a plant:"]
    for row in content["unplanted"]:
        lines.append(f"  {row['entry']:4} {row['what']}: {row['reason']} (against it: {row['guard']})")
    lines += ["", "Plant one in a pytest run with --npu-fault NAME; all of them with pytest -m faults."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
