"""The production functions of a model, made from its kernel sequence.

Names, argument order and return values are those of the mlir-air LLM examples (e972f2942), so that their
runner can drive our models and ours theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llms.llama_kernel_builder import llama_loop
from llms.llama_kernel_builder.block_runner import BlockRunner
from llms.llama_kernel_builder.llama_loop import KernelSequence, KVCache, Pass
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.weights import ModelWeights

Array = np.ndarray[Any, Any]


class ProductionFunctions:
    """prepare_runtime, run_npu_prefill and run_npu_decode_step of one model.

    `sequence` is called at every use, so that a test can plant a fault in the model's own SEQUENCE.
    """

    def __init__(self, sequence: Callable[[], KernelSequence]) -> None:
        self._sequence = sequence

    def prepare_runtime(
        self,
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
        sequence = self._sequence()
        llama_loop.prepare_prefill(
            prefill_cache, sequence, weights, config, seq_len, rope_lut, npu_attn=npu_attn
        )
        llama_loop.prepare_decode(decode_cache, sequence, weights, config)

    def run_npu_prefill(
        self,
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
        """Prefill a prompt into a new KV cache: (first token, logits row, k_cache, v_cache, prompt_len).

        The prompt length is the number of token ids, whatever tokens they are.
        """
        cache = KVCache.empty(config, max_seq)
        forward = Pass(self._sequence(), config, weights, cache, 0, rope_lut, layer_outputs)
        token, logits = llama_loop.prefill(forward, token_ids, prefill_cache, decode_cache)
        return token, logits, cache.k, cache.v, len(token_ids)

    def run_npu_decode_step(
        self,
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
        """Decode one token whose embedding row is x [emb] bf16: (next token, logits [vocab] bf16)."""
        cache = KVCache(k_cache, v_cache)
        forward = Pass(self._sequence(), config, weights, cache, current_pos, rope_lut, layer_outputs)
        return llama_loop.decode_step(forward, x, decode_cache)
