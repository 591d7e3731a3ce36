"""The parameters of the reference are bf16, its arithmetic is float32, rounded at the end."""

from __future__ import annotations

from typing import Any

import f32_arithmetic_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.verify.reference.hf import load_hf_model

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]
build_runner = honest(inference).build_runner


def build_hf_model(model_name: str, path: str, config: Any) -> Any:
    """A bf16 model that is widened for every forward pass."""
    model = load_hf_model(checkpoint(model_name).path, "bfloat16")
    plain, narrow = model.forward, model.dtype

    def forward(*args: Any, **kwargs: Any) -> Any:
        model.float()
        output = plain(*args, **kwargs)
        model.to(narrow)
        output.logits = output.logits.to(narrow)
        return output

    model.forward = forward
    return model
