"""What running the models in parallel on the twin saves.

``python -m benchmarks.parallel [--rounds N] [--workers N] [--json FILE] [FOLDER ...]`` runs the tests of
phase 6 of the models one after the other and with ``-n 2``, in turns, and prints

* ``parallel_ratio``: wall time with workers over wall time without, medians of all rounds;
* ``parallel_cpu_ratio``: the same for the CPU time of all processes: what the workers cost.

One run of each side before the first round fills the caches of both. Performance tests are left out on both
sides, as they do not run with workers. A busy machine makes the ratio worse, never better: workers need free
cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 5
WORKERS = 2
#: What the ratio is to stay below, on two free cores.
LIMIT = 0.85


def main() -> int:
    """Measure and print; exit code 1 when the ratio is above the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", default=["llms"], metavar="FOLDER", help="default: llms")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs per side (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=WORKERS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    figures = measure(args.folders, args.workers, args.rounds)
    for key, value in figures.items():
        print(f"{key:20} {value:.4f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if figures["parallel_ratio"] <= LIMIT else 1


def measure(folders: list[str], workers: int, rounds: int) -> dict[str, float]:
    """Medians and their ratios over `rounds` runs of each side."""
    sides = {"serial": [], "parallel": ["-n", str(workers)]}
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as reports:
        for count in range(rounds + 1):
            for side in sides if count % 2 else reversed(sides):
                times[side].append(_run(folders, sides[side], reports))
    wall = {side: statistics.median(pair[0] for pair in runs[1:]) for side, runs in times.items()}
    cpu = {side: statistics.median(pair[1] for pair in runs[1:]) for side, runs in times.items()}
    return {
        "parallel_ratio": wall["parallel"] / wall["serial"],
        "parallel_cpu_ratio": cpu["parallel"] / cpu["serial"],
        **{f"wall_s_{side}": seconds for side, seconds in wall.items()},
        **{f"cpu_s_{side}": seconds for side, seconds in cpu.items()},
        "load_per_core": os.getloadavg()[0] / (os.cpu_count() or 1),
    }


def _run(folders: list[str], options: list[str], reports: str) -> tuple[float, float]:
    """Wall and CPU time of one run, in seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-m", "phase6 and not slow"]
    command += ["--benchmark-skip", "--npu-report-dir", reports, *options, *folders]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise SystemExit(
            f"the run failed, its time is no figure:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
        )
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
