"""Prefill of Qwen2.5: bias on Q, K and V before RoPE; O+FFN in as many ELFs as its widths need.

4864 is no multiple of 512, so the down projection of the 0.5B has an ELF of its own; 1.5B (8960), 3B (11008)
and 7B (18944) need one ELF per projection.
"""

from __future__ import annotations

from llms.llama_kernel_builder.elfs import flash_attn, o_ffn, rms_qkv_bias_rope
from llms.llama_kernel_builder.layer import Array, Layer, LayerRun
from llms.llama_kernel_builder.model_config import ModelConfig


def prefill_blocks(config: ModelConfig, seq_len: int) -> Layer:
    """The ELFs of one layer for one prompt length."""
    return Layer(
        qkv=rms_qkv_bias_rope(config, seq_len),  # RMSNorm; Q, K, V + bias; RoPE
        attention=flash_attn(config, seq_len),
        ffn=o_ffn(config, seq_len),  # output projection; RMSNorm; SwiGLU: one, two or five ELFs by width
    )


def prefill_layer(run: LayerRun, x: Array) -> tuple[Array, Array, Array]:
    """One layer over x [seq_len, emb] bf16; returns (out, k after RoPE, v)."""
    q, k, v = run.qkv(x)
    return run.ffn(run.attention(q, k, v), residual=x), k, v
