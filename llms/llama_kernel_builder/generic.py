"""The blocks of a Llama-family model that follow from its configuration alone, without a model folder."""

from __future__ import annotations

from typing import Any

from . import elfs
from .layer import Layer
from .llama_loop import KernelSequence
from .model_config import ModelConfig


def generic_sequence() -> KernelSequence:
    """The kernel sequence that a scaffolded model has; its layer functions are the model's own."""

    def prefill_blocks(config: ModelConfig, seq_len: int) -> Layer:
        return Layer(
            qkv=elfs.qkv_of(config)[0](config, seq_len),
            attention=elfs.flash_attn(config, seq_len),
            ffn=elfs.o_ffn(config, seq_len),
        )

    def decode_blocks(config: ModelConfig) -> Layer:
        return Layer(qkv=elfs.qkv_of(config)[1](config), ffn=elfs.o_gemv_ffn(config))

    def run_nothing(*_arguments: Any) -> Any:
        raise RuntimeError("this sequence describes a model, it does not run one")

    return KernelSequence(prefill_blocks, run_nothing, decode_blocks, run_nothing, elfs.lm_head_gemv)
