"""Prefill of Qwen3-0.6B: a norm per head on Q and K before RoPE, heads of 128 attended heads first.

The query projection is 2048 wide while the model is 1024 wide: head_dim is explicit.
"""

from __future__ import annotations

from llms.llama_kernel_builder.elfs import flash_attn, o_ffn, rms_qkv_qknorm_rope
from llms.llama_kernel_builder.layer import Array, Layer, LayerRun
from llms.llama_kernel_builder.model_config import ModelConfig


def prefill_blocks(config: ModelConfig, seq_len: int) -> Layer:
    """The ELFs of one layer for one prompt length."""
    return Layer(
        qkv=rms_qkv_qknorm_rope(config, seq_len),  # RMSNorm; Q, K, V; norm per head of Q, K; RoPE
        attention=flash_attn(config, seq_len),
        ffn=o_ffn(config, seq_len),  # output projection; RMSNorm; SwiGLU: one ELF
    )


def prefill_layer(run: LayerRun, x: Array) -> tuple[Array, Array, Array]:
    """One layer over x [seq_len, emb] bf16; returns (out, k after RoPE, v)."""
    q, k, v = run.qkv(x)
    return run.ffn(run.attention(q, k, v), residual=x), k, v
