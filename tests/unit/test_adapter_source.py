"""The tiny checkpoint stands in for the default choice only."""

from __future__ import annotations

from pathlib import Path

import pytest

from llms.checkpoints import CheckpointError
from llms.llama_kernel_builder.deployment.adapter import CheckpointSource

TINY = Path(__file__).parents[2] / "llms" / "qwen2" / "tiny"


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CheckpointSource:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return CheckpointSource({"small": "org/small", "large": "org/large"}, "small", tiny=TINY)


def test_default_choice_falls_back(source: CheckpointSource) -> None:
    found = source.checkpoint(source.resolve_model("small"))
    assert found.kind == "tiny"
    assert found.label == "tiny checkpoint qwen2 (not org/small)"


@pytest.mark.parametrize("name", ["large", "someone/else"])
def test_what_was_asked_for_and_is_not_to_be_had_is_an_error(source: CheckpointSource, name: str) -> None:
    with pytest.raises(CheckpointError, match="--checkpoint PATH"):
        source.checkpoint(source.resolve_model(name))


def test_a_path_is_explicit(source: CheckpointSource) -> None:
    assert source.checkpoint(str(TINY)).kind == "explicit"
    with pytest.raises(CheckpointError, match="does not exist"):
        source.checkpoint("/nowhere/at/all")
