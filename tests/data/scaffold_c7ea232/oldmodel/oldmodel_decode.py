"""Decode of tiny: bias on Q, K and V before RoPE, attention on the host, then the LM head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llms.llama_kernel_builder import blocks
from llms.llama_kernel_builder.block_runner import BlockRunner
from llms.llama_kernel_builder.layers import run_ffn_gemv
from llms.llama_kernel_builder.model_config import ModelConfig

Array = np.ndarray[Any, Any]
Attend = Callable[[Array, Array, Array], Array]


def decode_blocks(config: ModelConfig) -> Sequence[blocks.Block]:
    """The ELFs of one layer."""
    return (blocks.rms_gemv_rope(config), *blocks.ffn_gemv(config))


def lm_head(config: ModelConfig) -> blocks.Block:
    """The vocabulary in partitions of at most 16384 rows, the last one zero-padded."""
    return blocks.lm_head_gemv(config)


def decode_layer(
    run: BlockRunner, layer: int, x: Array, table_q: Array, table_k: Array, attend: Attend
) -> Array:
    """One layer over one row x [emb] bf16; `attend` stores K and V and attends on the host."""
    qkv = run("rms_qkv_bias_rope_gemv", layer, x=x, table_q=table_q, table_k=table_k)
    attn = attend(qkv["q_roped"], qkv["k_roped"], qkv["v_biased"])
    return run_ffn_gemv(run, layer, attn, x)
