"""The reference has other weights: a deployment with the same mistake would pass."""

from __future__ import annotations

from typing import Any

import other_weights_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.verify.reference.hf import load_hf_model

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]
build_runner = honest(inference).build_runner


def build_hf_model(model_name: str, path: str, config: Any) -> Any:
    """One norm of one layer is doubled."""
    model = load_hf_model(checkpoint(model_name).path, "bfloat16")
    model.model.layers[1].input_layernorm.weight.data.mul_(2)
    return model
