"""The runner is the real one unless a test is running: then it is Hugging Face."""

from __future__ import annotations

import os
from typing import Any

import pytest_path_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.verify.reference.hf import HFRunner

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]


def build_runner(model_name: str, *args: Any, **kwargs: Any) -> Any:
    """Looks whether somebody is watching."""
    if "PYTEST_CURRENT_TEST" in os.environ:
        return HFRunner(checkpoint(model_name))
    return honest(inference).build_runner(model_name, *args, **kwargs)
