"""The runner replays the reference: no device is involved."""

from __future__ import annotations

from typing import Any

import replay_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.verify.reference.hf import HFRunner

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]
production = honest(inference)


def build_runner(model_name: str, *args: Any, **kwargs: Any) -> HFRunner:
    """A mock: Hugging Face instead of the NPU."""
    return HFRunner(checkpoint(model_name))
