"""Planted faults in the tiny models on the twin: each must fail the ladder by the recorded limits.

The same faults on SmolLM2-135M are what ``python -m tools.thresholds smollm2_135m`` measures; their values
stand in ``llms/verify/ladder/thresholds.json``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import llms
from llms.llama_kernel_builder import driver
from llms.verify.contract.deployment import Deployment
from llms.verify.ladder.climbing import Ladder
from llms.verify.ladder.thresholds import load_file
from tools.thresholds.faults import FAULTS, ModelFault, fault

MODELS = ("smollm2_135m", "qwen2", "qwen3_0_6b", "llama32_1b")
N_TOKENS = 32


@cache
def deployment(model: str) -> Deployment:
    driver.select("twin")
    return Deployment.from_folder(model, checkpoint=Path(llms.__file__).parent / model / "tiny")


def applicable() -> list[tuple[str, ModelFault]]:
    """Every fault on SmolLM2's tiny model; those that do not apply there on the first model where they do."""
    pairs = []
    for one in FAULTS:
        for model in MODELS:
            if one.applies(deployment(model).config()):
                pairs.append((model, one))
                break
    return pairs


def test_every_fault_applies_somewhere() -> None:
    assert {one.name for _, one in applicable()} == {one.name for one in FAULTS}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "planted"), applicable(), ids=lambda x: getattr(x, "name", x))
def test_a_planted_fault_fails_the_ladder(model: str, planted: ModelFault) -> None:
    subject = deployment(model)
    subject.release_runners()
    with planted.plant(subject.config()):
        outcome = Ladder(subject, subject.hf_reference(), subject.prompts(1), N_TOKENS).climb()
    failed = [rung.name for rung in outcome.rungs if rung.status == "failed"]
    assert failed, f"{planted.name} ({planted.what}) was seen by no rung"
    assert "layer" in outcome.message or "step" in outcome.message or "prefill" in outcome.message


@pytest.mark.parametrize("model", MODELS)
def test_a_clean_device_raises_no_alarm(model: str) -> None:
    """Other prompts than those the limits were measured on."""
    subject = deployment(model)
    subject.release_runners()
    prompts = (subject.encode("Name three rivers.", "instruct"), subject.encode("Once upon a time", "base"))
    outcome = Ladder(subject, subject.hf_reference(), prompts, N_TOKENS).climb()
    assert outcome.ok, outcome.message
    assert {rung.status for rung in outcome.rungs} == {"passed"}


def test_a_faulty_layer_is_named() -> None:
    """A reader learns the layer: two weights of layer 2 of 4 are swapped."""
    subject = deployment("smollm2_135m")
    subject.release_runners()
    with fault("gate_up_swapped").plant(subject.config()):
        outcome = Ladder(subject, subject.hf_reference(), subject.prompts(1), N_TOKENS).climb()
    assert "output of layer 2" in outcome.rung("layer_check").message()


@pytest.mark.parametrize("model", sorted(load_file()["models"]))
def test_recorded_limits_stand_between_clean_and_faulty(model: str) -> None:
    measured = load_file()["models"][model]
    for name, entry in measured["limits"].items():
        assert entry["clean"]["max"] <= entry["limit"], name
        if entry["weakest_fault"] is not None:
            assert entry["weakest_fault"]["value"] > entry["limit"], name
    unseen = [name for name, one in measured["faults"].items() if not one["seen_by"]]
    assert not unseen, f"faults that no statistic sees: {unseen}"
    assert len(measured["content_hash"]) >= 32
