"""Faults of tokens, prompts, reference and gate: a verdict that is not earned."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from llms.faults.seams import EXAMPLES, Array, around, fault, token_text, tokenizer_files
from llms.llama_kernel_builder.deployment import adapter
from llms.llama_kernel_builder.deployment.runner import ProductionRunner
from llms.verify.contract import chat
from llms.verify.contract import deployment as deployment_module
from llms.verify.contract.deployment import Deployment
from llms.verify.contract.models import ROOT
from llms.verify.contract.records import PrefillRecord
from llms.verify.gates.phase6 import gate as token_gate
from npu_twin.faults._types import Fault, Plant

_GATES = "the usual gate of LLM deployments: compare lists of tokens"


def _chat(*, turn: bool, **options: Any) -> Plant:
    """Encode chat prompts with or without the assistant's turn, and with these options of the tokenizer."""

    def encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[int, ...]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=turn)
        return tuple(int(token) for token in tokenizer(text, **options)["input_ids"])

    return mock.patch.object(chat, "encode_chat", encode)


@contextlib.contextmanager
def _double_begin() -> Iterator[None]:
    """The text of the template is encoded with special tokens again, and no guard looks."""
    with _chat(turn=True), mock.patch.object(chat, "_check_begin", return_value=None):
        yield


def _adds_begin(model: Any) -> bool:
    settings, template, processor = tokenizer_files(model)
    begin = token_text(settings, "bos_token")
    return bool(begin) and begin in processor and (begin in template or "bos_token" in template)


def _other_tokenizer() -> Plant:
    """The tokenizer of another model."""

    def tokenizer(self: Deployment) -> Any:
        from transformers import AutoTokenizer

        other = "qwen2" if self.name != "qwen2" else "llama32_1b"
        return AutoTokenizer.from_pretrained(ROOT / other / "tiny", local_files_only=True)

    replaced: Any = cached_property(tokenizer)
    replaced.__set_name__(Deployment, "tokenizer")
    return mock.patch.object(Deployment, "tokenizer", replaced)


class _Mock(ProductionRunner):
    """A runner that answers with the reference, and describes itself as the deployment does."""

    @cached_property
    def _reference(self) -> Any:
        from llms.verify.reference.hf import HFRunner

        return HFRunner(self.session.checkpoint)

    def prefill(self, prompt_tokens: Array) -> Any:
        """The reference's prefill."""
        return self._reference.prefill(prompt_tokens)

    def decode_step(self, input_token: int, current_pos: int) -> Any:
        """The reference's decode step."""
        return self._reference.decode_step(input_token, current_pos)

    def decode_step_probed(self, input_token: int, current_pos: int) -> Any:
        """The reference's decode step with its layers."""
        return self._reference.decode_step_probed(input_token, current_pos)

    def kv_cache(self) -> Any:
        """The reference's cache."""
        return self._reference.kv_cache()


class _TokensOnly:
    """A runner that answers with the reference and offers tokens and logits, nothing to look inside by."""

    def __init__(self, name: str, session: Any, **_: Any) -> None:
        self.name = name
        self._answers = _Mock(name, session)

    def prefill(self, prompt_tokens: Array) -> PrefillRecord:
        """The reference's prefill, its layers left out."""
        whole = self._answers.prefill(prompt_tokens)
        return PrefillRecord([], np.empty(0, np.float32), whole.logits_at_pred, whole.top1_token)

    def decode_step(self, input_token: int, current_pos: int) -> Any:
        """The reference's decode step."""
        return self._answers.decode_step(input_token, current_pos)


def _audit_not_run(right: Any, command: Any, **options: Any) -> Any:
    """Instead of an audit, the report of an earlier one is put where it would write."""
    if "llms.audit" not in command:
        return right(command, **options)
    earlier: dict[str, Any] = {"model": Path(command[3]).name, "verdict": "PASS", "findings": []}
    earlier["environment"] = {"process": "1"}
    folder = Path(command[command.index("--out") + 1])
    (folder / "audit.json").write_text(json.dumps(earlier), encoding="utf-8")
    return right([sys.executable, "-c", "pass"], **options)


def _stops_early(right: Any, runner: Any, ids: Any, **options: Any) -> Any:
    """The device side hands over three tokens, whatever was asked for."""
    return right(runner, ids, **{**options, "n_tokens": min(3, options.get("n_tokens", 3))})


FAULTS: tuple[Fault, ...] = (
    fault(
        "double_bos", "the begin token stands twice", _double_begin, EXAMPLES, "E11", expected="phase0",
        applies=_adds_begin, where="a tokenizer that adds a begin token, and a template with one",
    ),
    fault(
        "other_tokenizer", "the tokenizer of another model", _other_tokenizer, "common set-up mistake", "E33",
        kind="runtime", expected="phase0", raises="IndexError",
    ),
    fault(
        "reference_dtype", "the reference runs in float32",
        lambda: around(
            Deployment, "hf_reference", lambda right, self, **kw: right(self, **{**kw, "dtype": "float32"})
        ),
        EXAMPLES, "E25", kind="verdict", expected="phase0",
    ),
    fault(
        "gate_on_a_mock", "the gate drives the reference instead of the deployment",
        lambda: mock.patch.object(adapter, "ProductionRunner", _Mock), _GATES, "E23",
        kind="verdict", expected="phase7",
    ),
    fault(
        "gate_on_a_mock_of_tokens", "the same, by a mock that offers tokens and logits only",
        lambda: mock.patch.object(adapter, "ProductionRunner", _TokensOnly), _GATES, "E23",
        kind="verdict", expected="phase7",
    ),
    fault(
        "audit_not_run", "the report of an earlier audit is handed over",
        lambda: around(subprocess, "Popen", _audit_not_run), _GATES, "E26", kind="verdict", expected="phase7",
    ),
    fault(
        "no_generation_prompt", "chat prompts end without the assistant's turn",
        lambda: _chat(turn=False, add_special_tokens=False), EXAMPLES, expected="phase0",
        applies=lambda model: bool(tokenizer_files(model)[1]), where="a chat template",
    ),
    fault(
        "stops_early", "the device side stops after 3 tokens",
        lambda: around(token_gate, "capture", _stops_early), _GATES, "E20", kind="verdict",
    ),
    fault(
        "no_prompts", "the set of prompts is empty",
        lambda: mock.patch.object(deployment_module, "load_prompts", return_value=()), _GATES, "E21",
        kind="verdict",
    ),
)  # fmt: skip
