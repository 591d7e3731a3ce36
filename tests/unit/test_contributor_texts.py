"""What a newcomer reads first is true: the contract of a model's layer, and the paths of CONTRIBUTING."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from llms.llama_kernel_builder.llama_loop import KernelSequence

ROOT = Path(__file__).resolve().parents[2]
MODELS = sorted(path.parent.name for path in (ROOT / "llms").glob("*/verify_adapter.py"))


def described() -> dict[str, list[str]]:
    """Field -> parameters, as the docstring of KernelSequence gives them."""
    text = inspect.getdoc(KernelSequence) or ""
    return {name: words.split(", ") for name, words in re.findall(r"^    (\w+): ``\(([^)]*)\)``", text, re.M)}


@pytest.mark.parametrize("model", MODELS)
def test_the_contract_of_a_layer_is_what_models_fulfil(model: str) -> None:
    sequence = importlib.import_module(f"llms.{model}.{model}_inference").SEQUENCE
    told = described()
    assert list(told) == [field.name for field in fields(KernelSequence)]
    for name, parameters in told.items():
        assert list(inspect.signature(getattr(sequence, name)).parameters) == parameters, name


def test_contributing_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = [path for path in re.findall(r"`([\w./]+)`", text) if "/" in path]
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def tracked_folders() -> list[str]:
    """Folders of the source tree that a reader meets, below `tests` only itself."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    folders = {str(Path(name).parent) for name in names.splitlines()}
    inside = re.compile(r"(^|/)(tests|tiny|templates|kernel_registry/details|\.github|\.ci|docs)(/|$)|^\.$")
    return sorted(folder for folder in folders if not inside.search(folder))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="folders are known to git only")
def test_the_map_of_the_readme_names_every_folder() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.split("## How it is built")[1].split("```")[1]
    named = {word.rstrip("/").rpartition("/")[2] for word in tree.split() if word.endswith("/")}
    assert [folder for folder in tracked_folders() if folder.rpartition("/")[2] not in named] == []


def test_the_life_of_a_prompt_names_files_that_are_there() -> None:
    text = (ROOT / "docs" / "life-of-a-prompt.md").read_text(encoding="utf-8")
    paths: list[str] = re.findall(r"`((?:llms|plugins|npu_twin)/[\w./]+)`", text)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []
