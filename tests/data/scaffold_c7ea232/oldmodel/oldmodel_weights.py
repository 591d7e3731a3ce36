"""Where the weights of tiny come from, and what its configuration must say."""

from __future__ import annotations

from pathlib import Path

from llms.adapter import CheckpointSource, use_registry
from llms.llama_kernel_builder.model_config import ModelConfig, RopeScaling

MODEL_CHOICES = {
    "instruct": "CHECKPOINT",
}
DEFAULT_MODEL = "instruct"

SOURCE = CheckpointSource(MODEL_CHOICES, DEFAULT_MODEL)

# Kernel rows that only this model needs; they were swept when the folder was made.
use_registry(Path(__file__).parent / "kernel_registry")

# As read from the checkpoint's config.json when this folder was made; phase 0 compares them.
CONFIG = ModelConfig(
    model_type="qwen2",
    n_layers=3,
    emb_dim=256,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    hidden_dim=512,
    vocab_size=2560,
    rope_theta=1000000.0,
    rope_scaling=RopeScaling(),
    rms_eps=1e-06,
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
    max_position=2048,
    eos_token_ids=(2499, 2497),
    o_bias=False,
)
