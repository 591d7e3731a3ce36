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

from llms.faults.seams import Array, token_text, tokenizer_files
from llms.llama_kernel_builder.deployment import adapter
from llms.llama_kernel_builder.deployment.runner import ProductionRunner
from llms.verify.contract import chat
from llms.verify.contract import deployment as deployment_module
from llms.verify.contract.deployment import Deployment
from llms.verify.contract.models import ROOT
from llms.verify.contract.records import PrefillRecord
from npu_twin.faults._types import Fault

_EXAMPLES = "Xilinx/mlir-air e972f2942, programming_examples/llms"
_GATES = "the usual gate of LLM deployments: compare lists of tokens"


@contextlib.contextmanager
def _double_begin() -> Iterator[None]:
    """The text of the template is encoded with special tokens again, and no guard looks."""

    def encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[int, ...]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tuple(int(token) for token in tokenizer(text)["input_ids"])

    with (
        mock.patch.object(chat, "encode_chat", encode),
        mock.patch.object(chat, "_check_begin", return_value=None),
    ):
        yield


def _adds_begin(model: Any) -> bool:
    settings, template, processor = tokenizer_files(model)
    begin = token_text(settings, "bos_token")
    return bool(begin) and begin in processor and (begin in template or "bos_token" in template)


@contextlib.contextmanager
def _other_tokenizer() -> Iterator[None]:
    """The tokenizer of another model."""

    def tokenizer(self: Deployment) -> Any:
        from transformers import AutoTokenizer

        root = ROOT
        other = "qwen2" if self.name != "qwen2" else "llama32_1b"
        return AutoTokenizer.from_pretrained(root / other / "tiny", local_files_only=True)

    replaced: Any = cached_property(tokenizer)
    replaced.__set_name__(Deployment, "tokenizer")
    with mock.patch.object(Deployment, "tokenizer", replaced):
        yield


@contextlib.contextmanager
def _other_dtype() -> Iterator[None]:
    right = Deployment.hf_reference

    def reference(self: Deployment, **options: Any) -> Any:
        return right(self, **{**options, "dtype": "float32"})

    with mock.patch.object(Deployment, "hf_reference", reference):
        yield


class _Mock(ProductionRunner):
    """A runner that answers with the reference, and describes itself as the deployment does."""

    def _hf(self) -> Any:
        if not hasattr(self, "_model"):
            from llms.verify.reference.hf import HFRunner

            self._model = HFRunner(self.session.checkpoint)
        return self._model

    def prefill(self, prompt_tokens: Array) -> Any:
        """The reference's prefill."""
        return self._hf().prefill(prompt_tokens)

    def decode_step(self, input_token: int, current_pos: int) -> Any:
        """The reference's decode step."""
        return self._hf().decode_step(input_token, current_pos)

    def decode_step_probed(self, input_token: int, current_pos: int) -> Any:
        """The reference's decode step with its layers."""
        return self._hf().decode_step_probed(input_token, current_pos)

    def kv_cache(self) -> tuple[Array, Array]:
        """The reference's cache."""
        found: tuple[Array, Array] = self._hf().kv_cache()
        return found


class _TokensOnly:
    """A runner that answers with the reference and offers tokens and logits, nothing to look inside by."""

    def __init__(self, name: str, session: Any, **_: Any) -> None:
        self.name = name
        self._checkpoint = session.checkpoint
        self._model: Any = None

    def _hf(self) -> Any:
        if self._model is None:
            from llms.verify.reference.hf import HFRunner

            self._model = HFRunner(self._checkpoint)
        return self._model

    def prefill(self, prompt_tokens: Array) -> PrefillRecord:
        """The reference's prefill, its layers left out."""
        found = self._hf().prefill(prompt_tokens)
        return PrefillRecord([], np.empty(0, np.float32), found.logits_at_pred, found.top1_token)

    def decode_step(self, input_token: int, current_pos: int) -> Any:
        """The reference's decode step."""
        return self._hf().decode_step(input_token, current_pos)


@contextlib.contextmanager
def _audit_not_run() -> Iterator[None]:
    """Instead of an audit, the report of an earlier one is put where it would write."""
    right = subprocess.Popen

    def start(command: Any, **options: Any) -> Any:
        if "llms.audit" not in command:
            return right(command, **options)
        earlier: dict[str, Any] = {"model": Path(command[3]).name, "verdict": "PASS", "findings": []}
        earlier["environment"] = {"process": "1"}
        folder = Path(command[command.index("--out") + 1])
        (folder / "audit.json").write_text(json.dumps(earlier), encoding="utf-8")
        return right([sys.executable, "-c", "pass"], **options)

    with mock.patch.object(subprocess, "Popen", start):
        yield


@contextlib.contextmanager
def _no_generation_prompt() -> Iterator[None]:
    def encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[int, ...]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        return tuple(int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"])

    with mock.patch.object(chat, "encode_chat", encode):
        yield


@contextlib.contextmanager
def _stops_early() -> Iterator[None]:
    """The device side hands over three tokens, whatever was asked for."""
    name = "capture"
    right = getattr(deployment_module, name)

    def short(runner: Any, ids: Any, **options: Any) -> Any:
        return right(runner, ids, **{**options, "n_tokens": min(3, options.get("n_tokens", 3))})

    with mock.patch.object(deployment_module, name, short):
        yield


FAULTS: tuple[Fault, ...] = (
    Fault(
        "double_bos", "silent", "the begin token stands twice", _EXAMPLES, "phase0", _double_begin, "E11",
        applies=_adds_begin, where="a tokenizer that adds a begin token, and a template with one",
    ),
    Fault(
        "other_tokenizer", "runtime", "the tokenizer of another model", "common set-up mistake", "phase0",
        _other_tokenizer, "E33", raises="IndexError",
    ),
    Fault(
        "reference_dtype", "verdict", "the reference runs in float32", _EXAMPLES, "phase0",
        _other_dtype, "E25"
    ),
    Fault(
        "gate_on_a_mock", "verdict", "the gate drives the reference instead of the deployment",
        _GATES, "phase7",
        lambda: mock.patch.object(adapter, "ProductionRunner", _Mock), "E23",
    ),
    Fault(
        "gate_on_a_mock_of_tokens", "verdict", "the same, by a mock that offers tokens and logits only",
        _GATES, "phase7",
        lambda: mock.patch.object(adapter, "ProductionRunner", _TokensOnly), "E23",
    ),
    Fault(
        "audit_not_run", "verdict", "the report of an earlier audit is handed over", _GATES, "phase7",
        _audit_not_run, "E26",
    ),
    Fault(
        "no_generation_prompt", "silent", "chat prompts end without the assistant's turn", _EXAMPLES,
        "phase0", _no_generation_prompt, applies=lambda model: bool(tokenizer_files(model)[1]),
        where="a chat template",
    ),
    Fault(
        "stops_early", "verdict", "the device side stops after 3 tokens", _GATES, "phase3",
        _stops_early, "E20",
    ),
    Fault(
        "no_prompts", "verdict", "the set of prompts is empty", _GATES, "phase3",
        lambda: mock.patch.object(deployment_module, "load_prompts", return_value=()), "E21",
    ),
)  # fmt: skip
