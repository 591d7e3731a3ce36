"""Where the weights of Llama-3.2-1B come from, and what its configuration must say."""

from __future__ import annotations

from pathlib import Path

from llms.llama_kernel_builder.deployment.adapter import CheckpointSource
from llms.llama_kernel_builder.model_config import ModelConfig, RopeScaling

MODEL_CHOICES = {
    "instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "base": "meta-llama/Llama-3.2-1B",
}
DEFAULT_MODEL = "instruct"

SOURCE = CheckpointSource(MODEL_CHOICES, DEFAULT_MODEL, tiny=Path(__file__).parent / "tiny")

# config.json of meta-llama/Llama-3.2-1B-Instruct; the checkpoint's own file is compared with it
CONFIG = ModelConfig(
    model_type="llama",
    n_layers=16,
    emb_dim=2048,
    n_heads=32,
    n_kv_heads=8,
    head_dim=64,
    hidden_dim=8192,
    vocab_size=128256,
    rope_theta=500000.0,
    rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
    rms_eps=1e-5,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    max_position=131072,
    eos_token_ids=(128001, 128008, 128009),
)
