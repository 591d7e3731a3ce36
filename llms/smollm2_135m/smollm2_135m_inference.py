"""Inference of SmolLM2-135M on NPU2: set-up, prefill, decode step, and the command line.

Run ``python -m llms.smollm2_135m.smollm2_135m_inference --prompt "What is gravity?"``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from llms.llama_kernel_builder import llama_loop
from llms.llama_kernel_builder.block_runner import BlockRunner
from llms.llama_kernel_builder.llama_loop import KernelSequence, KVCache
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.weights import ModelWeights

from .smollm2_135m_decode import decode_blocks, decode_layer, lm_head
from .smollm2_135m_prefill import prefill_blocks, prefill_layer

Array = np.ndarray[Any, Any]

MODEL = "smollm2_135m"
SEQUENCE = KernelSequence(prefill_blocks, prefill_layer, decode_blocks, decode_layer, lm_head)


def prepare_runtime(
    prefill_cache: BlockRunner,
    decode_cache: BlockRunner,
    weights: ModelWeights,
    config: ModelConfig,
    seq_len: int,
    rope_lut: Array,
    *,
    npu_attn: bool = True,
) -> None:
    """Compile the ELFs of one prefill bucket and of decode, and write all weights to the device."""
    llama_loop.prepare_prefill(prefill_cache, SEQUENCE, weights, config, seq_len, rope_lut, npu_attn=npu_attn)
    llama_loop.prepare_decode(decode_cache, SEQUENCE, weights, config)


def run_npu_prefill(
    token_ids: Sequence[int],
    weights: ModelWeights,
    config: ModelConfig,
    prefill_cache: BlockRunner,
    decode_cache: BlockRunner,
    rope_lut: Array,
    max_seq: int,
    tokenizer: Any = None,
    *,
    layer_outputs: list[Array] | None = None,
) -> tuple[int, Array, Array, Array, int]:
    """Prefill a prompt into a new KV cache: (first token, logits row, k_cache, v_cache, prompt_len)."""
    cache = KVCache.empty(config, max_seq)
    token, logits = llama_loop.prefill(
        prefill_cache, decode_cache, SEQUENCE, weights, config, token_ids, cache, layer_outputs
    )
    return token, logits, cache.k, cache.v, len(token_ids)


def run_npu_decode_step(
    x: Array,
    weights: ModelWeights,
    config: ModelConfig,
    decode_cache: BlockRunner,
    rope_lut: Array,
    k_cache: Array,
    v_cache: Array,
    current_pos: int,
    *,
    layer_outputs: list[Array] | None = None,
) -> tuple[int, Array]:
    """Decode one token whose embedding row is x [576] bf16: (next token, logits)."""
    cache = KVCache(k_cache, v_cache)
    return llama_loop.decode_step(
        decode_cache, SEQUENCE, weights, config, x, rope_lut, cache, current_pos, layer_outputs
    )


if __name__ == "__main__":
    from llms import inference_cli
    from llms.smollm2_135m import verify_adapter

    sys.exit(inference_cli.main(verify_adapter))
