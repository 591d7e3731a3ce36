"""What judges: the one list that both the gate ledger and the independent audit go by.

A verdict is stale once a file of :func:`judging_files` has changed, and the audit names every function and
constant of :func:`judging_modules` that a model's code has replaced. Code that a gate, a test of a model or
the audit imports is either in :data:`JUDGING` or, with the reason, in :data:`NOT_JUDGING`;
``tests/unit/test_judging.py`` fails for anything that is in neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llms.verify.contract.models import ROOT as MODELS

ROOT = MODELS.parent
"""The folder that holds the packages."""

PACKAGES = ("llms", "kernel_registry", "npu_twin", "fixed_order")

# A name stands for one module, `name.*` for a package with all its modules and data files.
JUDGING: Mapping[str, tuple[str, ...]] = {
    "gates": (
        "llms",
        "llms.audit",
        "llms.checkpoints.*",
        "llms.faults.*",  # the audit passes only if the gates fail with these
        "llms.optimisation",
        "llms.phase1",
        "llms.profiling",
        "llms.verify.*",
        "kernel_registry",
        "kernel_registry.registry_lookup",
    ),
    "toolkit": (
        "fixed_order.*",  # host attention, the twin's products, and the key of a reference run
        "kernel_registry.measure",  # runs the kernels of phase 1
        "kernel_registry.shapes",  # which kernels these are
        "llms.adapter",
        "llms.llama_kernel_builder.*",
        "llms.production",
    ),
    "twin": ("npu_twin.*",),
}
"""Part of a verdict's hash -> what belongs to it. Model folders are a part of their own."""

NOT_JUDGING: Mapping[str, str] = {
    "kernel_registry.*": "makes, checks and renders rows; what the gates read of a row is in judging_rows",
    "llms.deploy.*": "names that folders of earlier scaffolds import",
    "llms.inference_cli": "chat and command line of a model",
    "llms.llama_kernel_builder.deployment.compare": "a table of the report; no verdict depends on it",
    "llms.llama_kernel_builder.deployment.inference_cli": "chat and command line of a model",
    "llms.verify.localise": "names what follows, and no more",
    "llms.verify.localise.*": "names the first wrong kernel of a deployment that has failed already",
    "npu_twin.validate.*": "holds the twin against published measurements; no model is involved",
}
"""The rest of the packages -> why no verdict on a model depends on it."""

_NO_DATA = (".md", ".pyc")
_OF_A_ROW = ("op", "dims", "method", "tile", "herd", "attrs", "context", "status", "provenance")


def part_of(module: str) -> str | None:
    """Part that a module belongs to; None if it judges nothing. Raises LookupError if it is in no list."""
    parts = {name: part for part, names in JUDGING.items() for name in names}
    for name in _patterns(module):
        if name in parts:
            return parts[name]
        if name in NOT_JUDGING:
            return None
    raise LookupError(f"{module} is neither in JUDGING nor in NOT_JUDGING of {__name__}")


def judging_modules(root: Path | None = None) -> tuple[str, ...]:
    """Names of all modules that judge, measure or compute, without those that start on import (`__main__`).

    Raises LookupError when the list names something that does not exist. `root`: see :data:`ROOT`.
    """
    root = root or ROOT
    found = {module_name(path, root) for paths in judging_files(root).values() for path in _sources(paths)}
    return tuple(sorted(name for name in found if not name.endswith("__main__")))


def data_files() -> dict[str, Path]:
    """Limits, prompts and tables of :func:`judging_files`, by their path below :data:`ROOT`."""
    paths = (path for paths in judging_files().values() for path in paths if path.suffix != ".py")
    return {path.relative_to(ROOT).as_posix(): path for path in paths}


def judging_files(root: Path | None = None) -> dict[str, tuple[Path, ...]]:
    """Source and data files by part of the hash, sorted; texts for people (`*.md`) are left out.

    Raises LookupError when the list names something that does not exist. `root`: see :data:`ROOT`.
    """
    root = root or ROOT
    return {
        part: tuple(sorted({path for name in names for path in _files(root, name, part)}))
        for part, names in JUDGING.items()
    }


def judging_rows(model: str) -> tuple[str, ...]:
    """What gates read of the kernel registry for a model, one sorted line of JSON per row.

    Published rows are yardsticks of phase 1 and count whole, the model's own only by configuration and tag,
    so that a row for another model ends no verdict. Raises LookupError for a file that holds no rows.
    """
    from kernel_registry import registry_lookup

    lines = set()
    for path in (path for root in registry_lookup.roots() for path in (root / "details").glob("*.json")):
        try:
            for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
                lines |= set(_row_lines(row, model))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LookupError(
                f"{path}: not a kernel registry file ({error!r}); run: python -m kernel_registry check"
            ) from error
    return tuple(sorted(lines))


def module_name(path: Path, root: Path) -> str:
    """Dotted name of a source file below `root`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _row_lines(row: Mapping[str, Any], model: str) -> Iterator[str]:
    if row["provenance"] == "published-silicon":
        yield json.dumps({key: value for key, value in row.items() if key != "used_by"}, sort_keys=True)
    tags = [tag for tag in row.get("used_by", ()) if tag == model or tag.startswith(f"{model}:")]
    if tags:
        own = {key: row.get(key) for key in _OF_A_ROW}
        yield json.dumps({**own, "used_by": sorted(tags)}, sort_keys=True)


def _patterns(module: str) -> Iterator[str]:
    """Names that a list may have a module under, the most exact first."""
    yield module
    name = module
    while name:
        yield f"{name}.*"
        name = name.rpartition(".")[0]


def _files(root: Path, name: str, part: str) -> Iterator[Path]:
    place = root.joinpath(*name.removesuffix(".*").split("."))
    found = [place / "__init__.py", place.with_suffix(".py")]
    if name.endswith(".*"):
        found = [path for path in place.rglob("*") if _counts(path)]
    found = [path for path in found if path.is_file()]
    if not found:
        raise LookupError(f"{__name__} lists {name}, but there is no such code in {root}")
    # A data file belongs to the package it lies in.
    return (path for path in found if part_of(module_name(_source_of(path), root)) == part)


def _source_of(path: Path) -> Path:
    if path.suffix == ".py":
        return path
    return next(folder for folder in path.parents if (folder / "__init__.py").is_file()) / "__init__.py"


def _counts(path: Path) -> bool:
    hidden = path.name.startswith(".") or "__pycache__" in path.parts
    return path.suffix not in _NO_DATA and not hidden


def _sources(paths: tuple[Path, ...]) -> Iterator[Path]:
    return (path for path in paths if path.suffix == ".py")
