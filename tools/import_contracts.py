"""An import-linter contract for what its import graph cannot see: modules that are named in strings.

`importlib.import_module("llms.faults")` is an import of `llms.faults`, but no import statement. This contract
reads the string literals of a package (docstrings apart) and refuses those that are the dotted name of a
module, or of something in a module, that the package may not import::

    [[tool.importlinter.contracts]]
    name = "..."
    type = "named_in_strings"
    forbidden = ["npu_twin -> llms, kernel_registry"]
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

_DOTTED = re.compile(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)+")


@dataclass(frozen=True)
class NamedModule:
    """A string literal that names a module which its file may not import."""

    importer: str
    line: int
    text: str


class NamedInStrings(Contract):
    """Refuses dotted names of other packages in string literals; see the module docstring."""

    forbidden = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Read every module of each source package."""
        broken: list[NamedModule] = []
        for rule in self.forbidden:  # type: ignore[attr-defined]
            source, _, targets = rule.partition("->")
            names = tuple(name.strip() for name in targets.split(","))
            modules = sorted(graph.modules & {source.strip(), *graph.find_descendants(source.strip())})
            for module in modules:
                broken += named_in(module, _source(module), names)
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """One line per literal."""
        for one in check.metadata["broken"]:
            output.print_error(f"{one.importer} (l.{one.line}) names {one.text!r} in a string", bold=False)


def named_in(module: str, source: str, forbidden: tuple[str, ...]) -> Iterator[NamedModule]:
    """String literals of `source` that name one of `forbidden` or something below it; docstrings apart."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documentation:
            continue
        text = node.value
        if not _DOTTED.fullmatch(text.rstrip(".")) and text not in forbidden:
            continue
        if any(text == name or text.startswith((f"{name}.", f"{name}:")) for name in forbidden):
            yield NamedModule(module, node.lineno, text)


def _source(module: str) -> str:
    """Text of a module, found below its top-level package, so that nothing of it is executed."""
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{top} is no package that can be found")
    place = Path(next(iter(spec.submodule_search_locations))).joinpath(*below)
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return path.read_text(encoding="utf-8")
