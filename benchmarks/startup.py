"""What an unrelated test suite pays for having the plugin installed.

``python -m benchmarks.startup [--rounds N] [--json FILE]`` writes a folder of tests that have nothing to do
with an NPU and runs it with and without ``-p no:npu``, in turns, so a busy machine hits both sides alike:

* ``startup_ratio``: wall time with the plugin over the time without it, medians of all rounds;
* ``startup_cpu_ratio``: the same for user and system time of the process, which other load disturbs less.

Other pytest plugins are left out (``PYTEST_DISABLE_PLUGIN_AUTOLOAD``): beside them the plugin weighs less.
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

ROUNDS = 25
FILES, TESTS = 10, 20
#: What the ratio is to stay below.
LIMIT = 1.05
_TEST = "import json\n\n" + "\n\n".join(
    f"def test_{number}(tmp_path_factory):\n    assert json.loads('{number}') == {number}"
    for number in range(TESTS)
)


def main() -> int:
    """Measure and print; exit code 1 when the ratio of the CPU times is above the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs per side (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    figures = measure(args.rounds)
    for key, value in figures.items():
        print(f"{key:22} {value:.4f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if figures["startup_cpu_ratio"] <= LIMIT else 1


def measure(rounds: int) -> dict[str, float]:
    """Medians and their ratios over `rounds` runs of each side; one more of each warms the caches."""
    times: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "suite"
        folder.mkdir()
        for number in range(FILES):
            (folder / f"test_unrelated_{number}.py").write_text(_TEST, encoding="utf-8")
        for count in range(rounds + 1):
            for side in ("with", "without") if count % 2 else ("without", "with"):
                times[side].append(_run(folder, side))
    wall = {side: statistics.median(pair[0] for pair in runs[1:]) for side, runs in times.items()}
    cpu = {side: statistics.median(pair[1] for pair in runs[1:]) for side, runs in times.items()}
    return {
        "startup_ratio": wall["with"] / wall["without"],
        "startup_cpu_ratio": cpu["with"] / cpu["without"],
        "wall_s_with": wall["with"],
        "wall_s_without": wall["without"],
        "cpu_s_with": cpu["with"],
        "cpu_s_without": cpu["without"],
    }


def _run(folder: Path, side: str) -> tuple[float, float]:
    """Wall and CPU time of one run, in seconds."""
    plugin = ["-p", "npu"] if side == "with" else ["-p", "no:npu"]
    bytecode = str(folder.parent / "bytecode")  # warm after the first round, as after an installation
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPYCACHEPREFIX": bytecode}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, "."]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise SystemExit(f"the unrelated suite failed, its time is no figure:\n{done.stdout}{done.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
