"""The runner calls the production functions and throws away what they return."""

from __future__ import annotations

from typing import Any

import discards_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.verify.reference.hf import HFRunner

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]


class Discarding:
    """Does all the work on the device and answers with Hugging Face."""

    def __init__(self, real: Any, other: HFRunner) -> None:
        self.name = real.name
        self._real = real
        self._other = other

    def prefill(self, prompt_tokens: Any) -> Any:
        """Work, then another's answer."""
        self._real.prefill(prompt_tokens)
        return self._other.prefill(prompt_tokens)

    def decode_step(self, input_token: int, current_pos: int) -> Any:
        """Work, then another's answer."""
        self._real.decode_step(input_token, current_pos)
        return self._other.decode_step(input_token, current_pos)

    def close(self) -> None:
        """Release the device."""
        self._real.close()


def build_runner(model_name: str, *args: Any, **kwargs: Any) -> Discarding:
    """The real runner beside a mock."""
    real = honest(inference).build_runner(model_name, *args, **kwargs)
    return Discarding(real, HFRunner(checkpoint(model_name)))
