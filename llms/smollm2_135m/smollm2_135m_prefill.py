"""Prefill of SmolLM2-135M: three ELFs per layer, fifteen launches."""

from __future__ import annotations

from llms.llama_kernel_builder.elfs import flash_attn, o_ffn, rms_gemms_rope
from llms.llama_kernel_builder.layer import Array, Layer, LayerRun
from llms.llama_kernel_builder.model_config import ModelConfig


def prefill_blocks(config: ModelConfig, seq_len: int) -> Layer:
    """The ELFs of one layer for one prompt length."""
    return Layer(
        qkv=rms_gemms_rope(config, seq_len),  # RMSNorm; Q, K, V; RoPE
        attention=flash_attn(config, seq_len),
        ffn=o_ffn(config, seq_len),  # output projection; RMSNorm; SwiGLU: one ELF
    )


def prefill_layer(run: LayerRun, x: Array) -> tuple[Array, Array, Array]:
    """One layer over x [seq_len, emb] bf16; returns (out, k after RoPE, v)."""
    q, k, v = run.qkv(x)
    return run.ffn(run.attention(q, k, v), residual=x), k, v
