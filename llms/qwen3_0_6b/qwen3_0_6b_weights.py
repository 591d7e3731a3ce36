"""Where the weights of Qwen3-0.6B come from, and what its configuration must say."""

from __future__ import annotations

from pathlib import Path

from llms.llama_kernel_builder.deployment.adapter import CheckpointSource
from llms.llama_kernel_builder.model_config import ModelConfig, RopeScaling

MODEL_CHOICES = {
    "instruct": "Qwen/Qwen3-0.6B",
    "base": "Qwen/Qwen3-0.6B-Base",
}
DEFAULT_MODEL = "instruct"

SOURCE = CheckpointSource(MODEL_CHOICES, DEFAULT_MODEL, tiny=Path(__file__).parent / "tiny")

# config.json of Qwen/Qwen3-0.6B; the checkpoint's own file is compared with it
CONFIG = ModelConfig(
    model_type="qwen3",
    n_layers=28,
    emb_dim=1024,
    n_heads=16,
    n_kv_heads=8,
    head_dim=128,
    hidden_dim=3072,
    vocab_size=151936,
    rope_theta=1000000.0,
    rope_scaling=RopeScaling(),
    rms_eps=1e-6,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=True,
    max_position=40960,
    eos_token_ids=(151645, 151643),
)
