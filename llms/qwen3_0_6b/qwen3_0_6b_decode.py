"""Decode of Qwen3-0.6B: a norm per head on Q and K before RoPE, attention on the host, then the LM head."""

from __future__ import annotations

from llms.llama_kernel_builder.block import Block
from llms.llama_kernel_builder.elfs import lm_head_gemv, o_gemv_ffn, rms_qkv_qknorm_rope_gemv
from llms.llama_kernel_builder.layer import Array, Layer, LayerRun
from llms.llama_kernel_builder.model_config import ModelConfig


def decode_blocks(config: ModelConfig) -> Layer:
    """The ELFs of one layer; the host attends."""
    return Layer(qkv=rms_qkv_qknorm_rope_gemv(config), ffn=o_gemv_ffn(config))


def lm_head(config: ModelConfig) -> Block:
    """The vocabulary in partitions of 16384 rows, the last one zero-padded."""
    return lm_head_gemv(config)


def decode_layer(run: LayerRun, x: Array) -> Array:
    """One layer over one row x [emb] bf16; attention stores K and V and runs on the host."""
    q, k, v = run.qkv(x)
    return run.ffn(run.attention(q, k, v), residual=x)
