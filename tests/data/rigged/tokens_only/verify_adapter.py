"""The runner is a mock that knows the tokens: its logits are one for the token and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import tokens_only_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.verify.contract.records import DecodeStepRecord, PrefillRecord
from llms.verify.reference.hf import HFRunner

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]


class TokensOnly:
    """Hugging Face's tokens with made-up logits."""

    name = "tokens only"

    def __init__(self, real: HFRunner) -> None:
        self._real = real

    def prefill(self, prompt_tokens: Any) -> PrefillRecord:
        """The token, and nothing of the layers."""
        found = self._real.prefill(prompt_tokens)
        row = _one(found.top1_token, found.logits_at_pred.size)
        return PrefillRecord([], np.empty(0, np.float32), row, found.top1_token)

    def decode_step(self, input_token: int, current_pos: int) -> DecodeStepRecord:
        """The token."""
        found = self._real.decode_step(input_token, current_pos)
        return DecodeStepRecord(_one(found.top1_token, found.lm_head_logits.size), found.top1_token)


def _one(token: int, size: int) -> Any:
    row = np.zeros(size, np.float32)
    row[token] = 1.0
    return row


def build_runner(model_name: str, *args: Any, **kwargs: Any) -> TokensOnly:
    """No device."""
    return TokensOnly(HFRunner(checkpoint(model_name)))


production = honest(inference)
