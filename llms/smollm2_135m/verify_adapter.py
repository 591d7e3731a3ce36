"""How the gates reach SmolLM2-135M: the adapter of the deployment contract."""

from __future__ import annotations

from typing import Any

from llms.llama_kernel_builder.model_config import ModelConfig
from llms.runner import ProductionRunner
from llms.session import Session

from . import smollm2_135m_inference as inference
from .smollm2_135m_weights import CONFIG, DEFAULT_MODEL, MODEL_CHOICES, checkpoint, resolve_model

__all__ = [
    "DEFAULT_MODEL",
    "MODEL_CHOICES",
    "build_config",
    "build_runner",
    "checkpoint",
    "hf_reference",
    "resolve_model",
]


def hf_reference(name: str) -> str:
    """The reference runs on the very checkpoint that is deployed."""
    return name


def build_config(model_name: str | None = None) -> ModelConfig:
    """The configuration of a checkpoint; without one, that of the published model."""
    return CONFIG if model_name is None else ModelConfig.from_hf_folder(checkpoint(model_name).path)


def build_runner(
    model_name: str,
    config: ModelConfig,
    max_seq: int,
    tokenizer: Any,
    *,
    npu_attn: bool = True,
    lite_mode: bool = False,
) -> ProductionRunner:
    """Load weights, compile or load kernels and prepare the runtime."""
    session = Session(inference, checkpoint(model_name), tokenizer, max_seq, config=config, npu_attn=npu_attn)
    return ProductionRunner(model_name, session, lite_mode=lite_mode)
