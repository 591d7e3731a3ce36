"""Names that folders of earlier scaffolds import: the feed-forward part of a layer, by names of ELFs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .layer import Array

if TYPE_CHECKING:
    from llms.production import NamedRun

_PREFILL = ("o_ffn", "o_ffn_head", "o_res_norm", "gate", "up", "swiglu", "down_add")
_DECODE = ("o_gemv_ffn", "o_gemv_res_norm", "gate_up_gemv", "down_gemv_add")


def run_ffn(run: NamedRun, suffix: str, layer: int, attn: Array, residual: Array) -> Array:
    """O+FFN over attn [seq_len, q_dim] and the layer's input [seq_len, emb]; returns the layer's output."""
    names = [name + suffix for name in _PREFILL]
    return run.chain(names, layer, attn=attn, residual=residual)["out"]


def run_ffn_gemv(run: NamedRun, layer: int, attn: Array, residual: Array) -> Array:
    """O+FFN over one row attn [q_dim] and the layer's input [emb]; returns the layer's output [emb]."""
    return run.chain(_DECODE, layer, attn=attn, residual=residual)["out"]
