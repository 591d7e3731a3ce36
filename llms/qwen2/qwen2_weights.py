"""Where the weights of Qwen2.5 come from, and what its configuration must say."""

from __future__ import annotations

from pathlib import Path

from llms.llama_kernel_builder.deployment.adapter import CheckpointSource
from llms.llama_kernel_builder.model_config import ModelConfig, RopeScaling

MODEL_CHOICES = {
    "0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "0.5b-base": "Qwen/Qwen2.5-0.5B",
    "1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "3b": "Qwen/Qwen2.5-3B-Instruct",
    "7b": "Qwen/Qwen2.5-7B-Instruct",
    "instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "base": "Qwen/Qwen2.5-0.5B",
}
DEFAULT_MODEL = "0.5b"

SOURCE = CheckpointSource(MODEL_CHOICES, DEFAULT_MODEL, tiny=Path(__file__).parent / "tiny")

# config.json of Qwen/Qwen2.5-0.5B-Instruct; the checkpoint's own file is compared with it
CONFIG = ModelConfig(
    model_type="qwen2",
    n_layers=24,
    emb_dim=896,
    n_heads=14,
    n_kv_heads=2,
    head_dim=64,
    hidden_dim=4864,
    vocab_size=151936,
    rope_theta=1000000.0,
    rope_scaling=RopeScaling(),
    rms_eps=1e-6,
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
    max_position=32768,
    eos_token_ids=(151645, 151643),
)
