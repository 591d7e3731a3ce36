"""`npu-deploy promote`: code that two or more models keep to themselves and that the toolkit should have."""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_deploy import folders
from npu_deploy.answer import Answer

# What a model folder is made of anyway: the deployment contract and the files every folder has.
_CONTRACT = {
    "resolve_model",
    "build_config",
    "build_runner",
    "hf_reference",
    "checkpoint",
    "prefill_blocks",
    "prefill_layer",
    "decode_blocks",
    "decode_layer",
    "lm_head",
}
_TOOLKIT = "llms.llama_kernel_builder"


@dataclass(frozen=True)
class _Own:
    """A function or class that a model defines itself."""

    model: str
    file: str
    name: str
    kind: str
    digest: str


def candidates(models: list[tuple[str, Path]] | None = None) -> Answer:
    """Functions and classes that two or more model folders define under one name, or with one body.

    A definition whose body is the same in several folders is a copy; one with the same name but another body
    is a variant. What the deployment contract asks every folder for does not count.
    """
    listed = models if models is not None else [(m.name, m.folder) for m in folders.all_models()]
    own = [item for name, folder in listed for item in _definitions(name, folder)]
    groups: dict[str, list[_Own]] = defaultdict(list)
    for item in own:
        groups[item.name].append(item)
    bodies: dict[str, set[str]] = defaultdict(set)
    for item in own:
        bodies[item.digest].add(item.name)
    shared: list[dict[str, Any]] = []
    for name, items in sorted(groups.items()):
        if len({item.model for item in items}) >= 2:
            copies = len({item.digest for item in items}) == 1
            shared.append(_entry(name, items, "copy" if copies else "variant"))
    named = {entry["name"] for entry in shared}
    for digest, names in sorted(bodies.items()):
        items = [item for item in own if item.digest == digest]
        if len(names) > 1 and len({item.model for item in items}) >= 2 and not names & named:
            shared.append(_entry(" = ".join(sorted(names)), items, "copy"))
    lines = [
        f"{entry['name']} ({entry['kind']}, {entry['relation']}): "
        + ", ".join(f"{place['model']}/{place['file']}" for place in entry["places"])
        + f"; move it to {_TOOLKIT}"
        for entry in shared
    ]
    none = f"nothing: no kernel or block is kept by two of the {len(listed)} models"
    return Answer({"models": [name for name, _ in listed], "candidates": shared}, tuple(lines or [none]))


def _entry(name: str, items: list[_Own], relation: str) -> dict[str, Any]:
    return {
        "name": name,
        "kind": items[0].kind,
        "relation": relation,
        "places": [{"model": item.model, "file": item.file} for item in items],
        "target": _TOOLKIT,
    }


def _definitions(model: str, folder: Path) -> Iterator[_Own]:
    for path in sorted([*folder.glob("*.py"), *folder.glob("multi_launch_builder/*.py")]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name in _CONTRACT:
                continue
            kind = "class" if isinstance(node, ast.ClassDef) else _kind(node)
            yield _Own(model, str(path.relative_to(folder)), node.name, kind, _digest(node))


def _kind(node: ast.FunctionDef) -> str:
    calls = {
        item.func.attr if isinstance(item.func, ast.Attribute) else getattr(item.func, "id", "")
        for item in ast.walk(node)
        if isinstance(item, ast.Call)
    }
    if calls & {"make_block", "Block", "Step"}:
        return "block"
    return "kernel" if calls & {"KernelSpec", "make"} else "function"


def _digest(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Of the body without name and docstring, so that a renamed copy is seen."""
    body = node.body
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        body = body[1:]
    arguments = ast.dump(node.args) if isinstance(node, ast.FunctionDef) else ""
    text = arguments + "".join(ast.dump(item) for item in body)
    return hashlib.sha256(text.encode()).hexdigest()
