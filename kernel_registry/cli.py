"""Command line of the registry: ``python -m kernel_registry check | render | sweep | add | show``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kernel_registry import registry_lookup as lookup
from kernel_registry import render as pages
from kernel_registry import stale, store
from kernel_registry.measure import MeasurementUnavailable, Measurer, TwinMeasurer, config_of, silicon
from kernel_registry.schema import RegistryError, row_id
from kernel_registry.shapes import DEFAULT_BUCKETS, Request, RequestError, from_file, parse
from kernel_registry.sweep import sweep


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernel_registry",
        description="Kernel registry: tiles, tolerances and figures of every measured kernel shape.",
    )
    sub = parser.add_subparsers(dest="command", required=True)

    def command(name: str, help_text: str) -> argparse.ArgumentParser:
        parsed = sub.add_parser(name, help=help_text, description=help_text)
        default = f"default: the first of {lookup.ENV}, else the packaged one"
        parsed.add_argument("--registry", type=Path, metavar="DIR", help=f"registry folder; {default}")
        return parsed

    command(
        "check",
        "Check schema, duplicates and legality of the rows, and that rows of the twin agree with its timing "
        "model and pages with the JSON files.",
    )
    command("render", "Write supported_kernels.md and details/*.md from the JSON files.")

    swept = command("sweep", "Find the best legal tile of shapes and add their rows.")
    swept.add_argument("op", nargs="?", help=f"kernel: {', '.join(lookup.DIMS)}")
    swept.add_argument("shape", nargs="*", help="e.g. 256x576x1536 for gemm MxKxN; several are allowed")
    swept.add_argument(
        "--model", type=Path, metavar="JSON", help="a model's config.json, or a file of shapes"
    )
    swept.add_argument(
        "--buckets",
        default=",".join(map(str, DEFAULT_BUCKETS)),
        help="prefill lengths for --model with a config.json (default %(default)s)",
    )
    swept.add_argument("--precision", choices=("high", "low"), default="high", help="tier of a gemm")
    swept.add_argument("--output-dtype", choices=("bf16", "f32"), default="bf16", help="output of a gemm")
    swept.add_argument("--causal", action="store_true", help="causal flash_attention")
    swept.add_argument("--method", default="", help="restrict to one implementation")
    swept.add_argument(
        "--used-by", action="append", default=[], metavar="TAG", help="model that needs the row"
    )
    swept.add_argument("--npu", action="store_true", help="measure on silicon; default: the twin")
    swept.add_argument("--artefacts", type=Path, metavar="DIR", help="compiled kernels for --npu")
    swept.add_argument("--no-numerics", action="store_true", help="latency only")
    swept.add_argument("--if-missing", action="store_true", help="leave shapes that have a usable row")
    swept.add_argument(
        "--stale",
        action="store_true",
        help="sweep the rows of the twin again that its timing model no longer agrees with, after a "
        "recalibration; error figures are computed only where the configuration changes",
    )
    swept.add_argument("--no-render", action="store_true", help="do not bring the pages up to date")

    added = command("add", "Add rows by hand from JSON: one row, or a list of rows.")
    added.add_argument("file", help="file with the row(s), or - for standard input")
    added.add_argument("--no-render", action="store_true", help="do not bring the pages up to date")

    shown = command("show", "Show the rows of a kernel, or of one shape, and which one a lookup takes.")
    shown.add_argument("op", choices=list(lookup.DIMS))
    shown.add_argument("shape", nargs="?")
    shown.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser


def _requests(args: argparse.Namespace) -> tuple[list[Request], list[str]]:
    requests: list[Request] = []
    tags: list[str] = []
    if args.model is not None:
        try:
            buckets = [int(b) for b in args.buckets.split(",") if b]
        except ValueError:
            raise RequestError(f"--buckets {args.buckets!r} must be integers separated by commas") from None
        requests, tags = from_file(args.model, buckets)
    elif not args.op or not args.shape:
        raise RequestError("name a kernel and a shape, or a file with --model")
    if args.op:
        variant = {name: getattr(args, name) for name in ("precision", "output_dtype", "causal", "method")}
        requests += [parse(args.op, shape, **variant) for shape in args.shape]
    return list(dict.fromkeys(requests)), tags


def _sweep(args: argparse.Namespace, root: Path) -> int:
    tags: list[str] = []
    if args.stale:
        if args.op or args.model or args.npu or args.if_missing:
            raise RequestError("--stale takes the shapes from the registry and sweeps them on the twin")
        numerics = stale.stale_requests(root)
    else:
        requests, tags = _requests(args)
        numerics = dict.fromkeys(requests, True)
    measurer: Measurer = silicon(args.artefacts) if args.npu else TwinMeasurer()
    failed = 0
    for request, with_numerics in numerics.items():
        try:
            done = sweep(
                request,
                measurer,
                root,
                used_by=[*tags, *args.used_by],
                with_numerics=with_numerics and not args.no_numerics,
                only_missing=args.if_missing,
                keep_numerics=args.stale,
            )
        except RequestError as error:
            print(f"{error}", file=sys.stderr)
            failed += 1
            continue
        latency = f"{done.latency_us:.1f} us" if done.latency_us is not None else "no time"
        print(f"{done.outcome:9} {request}: {latency}, {done.tried} tried, {done.row_id}", flush=True)
    if not args.no_render:
        pages.render(root)
    return 1 if failed else 0


def _add(args: argparse.Namespace, root: Path) -> int:
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
        data = json.loads(text)
    except (OSError, ValueError) as error:
        raise RegistryError(f"{args.file}: {error}") from None
    for row in data if isinstance(data, list) else [data]:
        op = row.get("op") if isinstance(row, dict) else None
        if op not in lookup.DIMS:
            raise RegistryError(f"{args.file}: a row needs an op, one of {', '.join(lookup.DIMS)}")
        try:
            identity = row_id(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise RegistryError(f"{args.file}: the row has no {error}") from None
        outcome = store.put(row, root)
        print(f"{outcome:9} {identity}")
    if not args.no_render:
        pages.render(root)
    return 0


def _check(root: Path) -> int:
    from npu_twin import constraints

    problems: list[str] = []
    everything = store.read_all(root)
    for rows in everything.values():
        problems += [
            f"row {row['id']} is usable but breaks {violation}"
            for row in filter(lookup.usable, rows)
            for violation in constraints.check(config_of(row))
        ]
        problems += stale.problems(rows)
    problems += pages.drift(root)
    if not everything:
        problems.append(f"{root / 'details'}: no registry files")
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(
            f"{len(problems)} problem(s); pages are written by: python -m kernel_registry render",
            file=sys.stderr,
        )
        return 1
    print(
        f"{root}: {sum(map(len, everything.values()))} rows of {len(everything)} kernels, "
        "timing model and pages agree"
    )
    return 0


def _show(args: argparse.Namespace, root: Path) -> int:
    rows = store.read(root, args.op)
    if args.shape:
        wanted = parse(args.op, args.shape).dims
        rows = [r for r in rows if r["dims"] == wanted]
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print(f"no rows; add one with: python -m kernel_registry sweep {args.op} {args.shape or 'SHAPE'}")
        return 1
    print(pages.kernel_page(args.op, rows))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 on success, 1 on a problem and 2 on wrong usage."""
    args = _parser().parse_args(argv)
    root: Path = args.registry or lookup.roots()[0]
    try:
        if args.command == "check":
            return _check(root)
        if args.command == "render":
            for path in pages.render(root):
                print(path)
            return 0
        return {"sweep": _sweep, "add": _add, "show": _show}[args.command](args, root)
    except (RegistryError, MeasurementUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
