"""``python -m tools.tiny_checkpoints``: train the tiny checkpoints of all families, or of some."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tools.tiny_checkpoints.corpus import load_corpus
from tools.tiny_checkpoints.families import FAMILIES
from tools.tiny_checkpoints.job import run

_ROOT = Path(__file__).resolve().parents[2]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_checkpoints", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAMILIES)}; all by default")
    parser.add_argument(
        "--out",
        type=Path,
        default=_ROOT / "llms",
        help="writes OUT/NAME/tiny (default: the repository's llms)",
    )
    parser.add_argument("--force", action="store_true", help="replace folders that exist")
    parser.add_argument("--jobs", type=int, default=2, help="models trained at a time, one thread each")
    parser.add_argument(
        "--measure", action="store_true", help="train nothing, print the figures of OUT/NAME/tiny"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code (0 done, 2 refused)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.names or list(FAMILIES)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        parser.error(f"unknown model {unknown[0]}: choose of {', '.join(FAMILIES)}")
    targets = {name: options.out / name / "tiny" for name in names}
    if options.measure:
        missing = [str(path) for path in targets.values() if not path.is_dir()]
        if missing:
            print(f"{missing[0]} does not exist: train it first", file=sys.stderr)
            return 2
    else:
        taken = [str(path) for path in targets.values() if path.exists()]
        if taken and not options.force:
            print(f"{', '.join(taken)} exists: --force replaces it", file=sys.stderr)
            return 2
    corpus = load_corpus()
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"corpus of Python {version}: sha256 {corpus.sha256}, {len(corpus.turns)} chat turns")
    started = time.monotonic()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(run, name, path, not options.measure) for name, path in targets.items()]
        for job in jobs:
            print("\n".join(job.result()), flush=True)
    print(f"{time.monotonic() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
