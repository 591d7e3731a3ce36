"""The ELFs of the Llama family: what a model's prefill and decode files are made of."""

from .block import Block, Step
from .blocks_decode import ffn_gemv, lm_head_gemv, qkv_gemv, rms_gemv_rope
from .blocks_prefill import ffn, flash_attn, qkv, rms_gemms_rope

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
