"""Names that folders of earlier scaffolds import; see llms.llama_kernel_builder.elfs.

Their functions name the first ELF by the configuration and give a stage as a sequence of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import elfs
from .block import Block, Step
from .elfs import lm_head_gemv
from .model_config import ModelConfig

__all__ = [
    "Block",
    "Step",
    "ffn",
    "ffn_gemv",
    "flash_attn",
    "lm_head_gemv",
    "qkv",
    "qkv_gemv",
    "rms_gemms_rope",
    "rms_gemv_rope",
]


def qkv(config: ModelConfig, seq_len: int) -> Sequence[Block]:
    """Everything of a layer before attention, in one ELF or two."""
    return elfs.qkv_of(config)[0](config, seq_len).blocks


def qkv_gemv(config: ModelConfig) -> Sequence[Block]:
    """Everything of a layer before attention, in one ELF or two."""
    return elfs.qkv_of(config)[1](config).blocks


def rms_gemms_rope(config: ModelConfig, seq_len: int) -> Block:
    """First ELF of a layer, with bias or per-head norm where the model has them."""
    return qkv(config, seq_len)[0]


def rms_gemv_rope(config: ModelConfig) -> Block:
    """First ELF of a layer of one row."""
    return qkv_gemv(config)[0]


def flash_attn(config: ModelConfig, seq_len: int) -> Sequence[Block]:
    """Attention, empty where the host attends."""
    return elfs.flash_attn(config, seq_len).blocks


def ffn(config: ModelConfig, seq_len: int) -> Sequence[Block]:
    """Output projection and feed-forward."""
    return elfs.o_ffn(config, seq_len).blocks


def ffn_gemv(config: ModelConfig) -> Sequence[Block]:
    """Output projection and feed-forward of one row."""
    return elfs.o_gemv_ffn(config).blocks
