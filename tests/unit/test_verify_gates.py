"""The gates as a test calls them: device held for device work only, verdict, payload and message together."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llms.verify
from llms.checkpoints import Checkpoint
from llms.verify import DecodeStepRecord, Deployment, PrefillRecord
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.gates.phase6.gate import layer_diagnosis, topk_gate
from llms.verify.reference.hf import HFReference, HFRunner

PROMPTS = (EncodedPrompt("one", (3, 17, 5), "base"), EncodedPrompt("two", (60, 22, 8, 9), "base"))


class Tokenizer:
    """Decodes ids to words."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return Checkpoint(folder, "tiny", "explicit", "d" * 64)


class Fault:
    """Wraps a runner: ``nan`` spoils one step's logits and ``stuck`` repeats a token."""

    name = "faulty"

    def __init__(self, inner: HFRunner, kind: str) -> None:
        self.inner, self.kind, self.step, self.closed = inner, kind, 0, False

    def prefill(self, prompt_tokens: Any) -> PrefillRecord:
        self.step = 0
        return self.inner.prefill(prompt_tokens)

    def decode_step(self, input_token: int, current_pos: int) -> DecodeStepRecord:
        self.step += 1
        record = self.inner.decode_step(input_token, current_pos)
        logits = np.array(record.lm_head_logits)
        if self.kind == "nan" and self.step == 3:
            logits[5] = np.nan
        if self.kind == "stuck":
            return DecodeStepRecord(logits, input_token)
        return DecodeStepRecord(logits, record.top1_token)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def subject(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    kind = getattr(request, "param", "clean")
    made: Any = Deployment.__new__(Deployment)
    made._runners = {}
    runner = HFRunner(tiny) if kind == "clean" else Fault(HFRunner(tiny), kind)

    def build(max_seq: int = 0, **_: Any) -> Any:
        made._runners["one"] = runner
        return runner

    held: list[bool] = []
    prefill = runner.prefill

    def used(tokens: Any) -> Any:
        assert held[-1:] == [True], "the device was used without being held"
        return prefill(tokens)

    monkeypatch.setattr(runner, "prefill", used, raising=False)

    @contextmanager
    def device() -> Iterator[None]:
        held.append(True)
        yield
        assert not made._runners, "the device was given back with open runners"
        held.append(False)

    monkeypatch.setattr(made, "runner", build, raising=False)
    monkeypatch.setattr(Deployment, "tokenizer", Tokenizer())
    made.device = device()
    return made


def test_a_clean_device_passes_and_reports(tiny: Checkpoint, subject: Any) -> None:
    outcome = topk_gate(subject, HFReference(tiny), PROMPTS, device=subject.device)
    assert outcome.ok
    assert outcome.message == ""
    assert [prompt["status"] for prompt in outcome.payload["prompts"]] == ["OK", "OK"]
    assert [prompt["prompt_tokens"] for prompt in outcome.payload["prompts"]] == [3, 4]


@pytest.mark.parametrize(
    ("subject", "says"),
    [("nan", "step 3 has logits that are not finite"), ("stuck", "its own logits put")],
    indirect=["subject"],
)
def test_a_sick_device_fails_with_a_readable_message(tiny: Checkpoint, subject: Any, says: str) -> None:
    outcome = topk_gate(subject, HFReference(tiny), PROMPTS, device=subject.device)
    assert not outcome.ok
    assert says in outcome.message
    assert "npu text: 'w" in outcome.message


def test_no_prompts_fail(tiny: Checkpoint, subject: Any) -> None:
    assert not topk_gate(subject, HFReference(tiny), ()).ok


def test_the_diagnosis_of_a_model_against_itself_is_exact(tiny: Checkpoint, subject: Any) -> None:
    found, payload = layer_diagnosis(
        subject, HFReference(tiny), PROMPTS[0], n_tokens=4, device=subject.device
    )
    assert not found.problems
    assert not found.missing
    assert all(row["max_abs"] == 0 for row in payload["rows"])
    assert payload["prompt"] == "one"


def test_every_import_of_the_package_is_exported() -> None:
    tree = ast.parse(Path(llms.verify.__file__).read_text(encoding="utf-8"))
    imported = {a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert imported == set(llms.verify.__all__)
