"""Prefill of Qwen3-0.6B: a norm per head on Q and K before RoPE, heads of 128 attended heads first.

The query projection is 2048 wide while the model is 1024 wide: head_dim is explicit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llms.llama_kernel_builder import blocks
from llms.llama_kernel_builder.block_runner import BlockRunner
from llms.llama_kernel_builder.layers import run_ffn
from llms.llama_kernel_builder.model_config import ModelConfig

Array = np.ndarray[Any, Any]


def prefill_blocks(config: ModelConfig, seq_len: int) -> Sequence[blocks.Block]:
    """The ELFs of one layer for one prompt length."""
    return (
        blocks.rms_gemms_rope(config, seq_len),
        *blocks.flash_attn(config, seq_len),
        *blocks.ffn(config, seq_len),
    )


def prefill_layer(run: BlockRunner, suffix: str, layer: int, x: Array) -> tuple[Array, Array, Array]:
    """One layer over x [seq_len, emb] bf16; returns (out, k after RoPE, v)."""
    qkv = run(f"rms_qkv_qknorm_rope{suffix}", layer, x=x)
    q, k, v = qkv["q_roped"], qkv["k_roped"], qkv["v"]
    attn = run(f"flash_attn{suffix}", layer, q=q, k=k, v=v)["attn"]
    return run_ffn(run, suffix, layer, attn, x), k, v
