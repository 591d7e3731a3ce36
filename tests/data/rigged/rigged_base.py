"""What the rigged adapters have in common: an honest deployment of the tiny Qwen2.5 to cheat around.

Each folder here cheats in one way. The independent audit must find each one out.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from llms.llama_kernel_builder.deployment.adapter import ModelAdapter
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.qwen2.qwen2_weights import CONFIG, DEFAULT_MODEL, MODEL_CHOICES, SOURCE

checkpoint = SOURCE.checkpoint
resolve_model = SOURCE.resolve_model

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "checkpoint", "honest", "resolve_model"]


def honest(inference: ModuleType) -> ModelAdapter:
    """An adapter without tricks."""
    production: Any = inference
    return ModelAdapter(production, SOURCE, CONFIG)


def build_config(model_name: str) -> ModelConfig:
    """Configuration of the checkpoint in use."""
    return ModelConfig.from_hf_folder(checkpoint(model_name).path)
