"""Prefill of tiny: bias on Q, K and V before RoPE, attention, O+FFN in one ELF."""

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
    qkv = run(f"rms_qkv_bias_rope{suffix}", layer, x=x)
    q, k, v = qkv["q_roped"], qkv["k_roped"], qkv["v_biased"]
    attn = run(f"flash_attn{suffix}", layer, q=q, k=k, v=v)["attn"]
    return run_ffn(run, suffix, layer, attn, x), k, v
