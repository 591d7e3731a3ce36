"""Names that folders of earlier scaffolds import; see llms.llama_kernel_builder.elfs."""

from .block import Block, Step
from .earlier import ffn, ffn_gemv, flash_attn, qkv, qkv_gemv, rms_gemms_rope, rms_gemv_rope
from .elfs import lm_head_gemv

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
