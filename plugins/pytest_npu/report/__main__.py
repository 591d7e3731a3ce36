"""``python -m pytest_npu.report PATH...``: render reports again from their event logs.

PATH is a run folder (``reports/MODEL/RUN``), or a folder above run folders, for example ``reports``: then
every run below it is rendered. The index next to the models is written too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_npu.core.exceptions import EventLogError
from pytest_npu.report.runlogs import EVENTS_FILE

from .index import write_index
from .write import render_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Render what the command line names; 0 when everything was written, 2 otherwise."""
    parser = argparse.ArgumentParser("python -m pytest_npu.report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="run folder, or a folder above some"
    )
    paths = parser.parse_args(arguments).paths
    status = 0
    roots = set()
    for path in paths:
        folders = [log.parent for log in sorted(path.resolve().rglob(EVENTS_FILE))]
        if not folders:
            print(f"{path}: no {EVENTS_FILE} in it or below", file=sys.stderr)
            status = 2
        for folder in folders:
            try:
                report = render_folder(folder)
            except (EventLogError, OSError) as error:
                print(f"{folder}: {error}", file=sys.stderr)
                status = 2
                continue
            print(f"{report.verdict:<10} {folder / 'report.html'}")
            roots.add(folder.parent.parent)
    for root in sorted(roots):
        print(f"{'index':<10} {write_index(root)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
