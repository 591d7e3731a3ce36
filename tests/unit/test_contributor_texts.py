"""What a newcomer reads first is true: the contract of a model's layer, and the paths of CONTRIBUTING."""

from __future__ import annotations

import importlib
import inspect
import re
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
