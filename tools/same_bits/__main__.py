"""``python -m tools.same_bits [--only NAME,..] [--model NAME ..] [--write]``: digests under every setting.

Each setting is a process of its own, because libraries read their variables once. The table names setting,
digests and seconds; exit code 1 says that a digest is not the one in the repository. ``--pytest ARGS``
runs pytest with these arguments under the settings instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from tools.same_bits.digests import DATA, MODELS, committed, digests
from tools.same_bits.settings import SETTINGS, environment


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="settings, separated by commas (default: all)")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    parser.add_argument(
        "--write", action="store_true", help="take the first setting's digests as the new ones"
    )
    parser.add_argument("--pytest", metavar="ARGS", help="run pytest under each setting")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    models = tuple(args.model or MODELS)
    if args.worker:
        print(json.dumps({model: digests(model) for model in models}))
        return 0
    names = args.only.split(",") if args.only else list(SETTINGS)
    if unknown := [name for name in names if name not in SETTINGS]:
        parser.error(f"no setting {', '.join(unknown)}; there are {', '.join(SETTINGS)}")
    if args.pytest:
        return max(_pytest(name, args.pytest) for name in names)
    expected = {} if args.write else committed()
    wrong = 0
    print(f"| setting | {' | '.join(models)} | s |\n|---|{'---|' * len(models)}---|")
    for name in names:
        begin = time.perf_counter()
        found = measured(name, models)
        seconds = time.perf_counter() - begin
        for model in models:
            expected.setdefault(model, found[model])
        cells = [_cell(found[model], expected[model]) for model in models]
        wrong += sum(found[model] != expected[model] for model in models)
        print(f"| {name} | {' | '.join(cells)} | {seconds:.1f} |", flush=True)
    if args.write and not wrong:
        DATA.write_text(json.dumps({**_old(), **expected}, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def _old() -> dict[str, dict[str, str]]:
    return committed() if DATA.is_file() else {}


def measured(setting: str, models: Sequence[str]) -> dict[str, dict[str, str]]:
    """Digests by model, from a process under ``setting``.

    Raises:
        RuntimeError: that process failed; the text is the end of what it said.
    """
    command = [sys.executable, "-m", "tools.same_bits", "--worker"]
    for model in models:
        command += ["--model", model]
    done = subprocess.run(
        command, env=environment(setting, os.environ), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"digests under {setting!r} failed:\n{done.stderr[-2000:]}")
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _cell(found: dict[str, str], expected: dict[str, str]) -> str:
    parts = [
        found[name][:8] + ("" if found[name] == expected[name] else " DIFFERS")
        for name in ("twin", "matched")
    ]
    return " / ".join(parts)


def _pytest(setting: str, arguments: str) -> int:
    print(f"pytest {arguments} under {setting}: {dict(SETTINGS[setting])}", flush=True)
    command = [sys.executable, "-m", "pytest", *shlex.split(arguments)]
    return subprocess.run(command, env=environment(setting, os.environ), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
