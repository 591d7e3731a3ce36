"""The reference runs in float32."""

from __future__ import annotations

from typing import Any

import fp32_reference_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.verify.reference.hf import load_hf_model

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]
build_runner = honest(inference).build_runner


def build_hf_model(model_name: str, path: str, config: Any) -> Any:
    """The contract's hook for models of their own, misused."""
    return load_hf_model(checkpoint(model_name).path, "float32")
