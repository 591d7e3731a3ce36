"""What folders call that `npu-deploy new` made before layers had stages.

`blocks`, `layers` and `llms.production` give it under the names that those import.

Their layer functions call ELFs by name, ``run("flash_attn_s128", layer, q=q, k=k, v=v)["attn"]``, and their
builders name the first ELF by the configuration. New folders have `elfs` and `layer.LayerRun`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import elfs
from .block import Block
from .deployment import production
from .layer import Array, Layer, LayerRun, Stage
from .llama_loop import KernelSequence
from .model_config import ModelConfig

_ATTENTION = "flash_attn"
_PREFILL = ("o_ffn", "o_ffn_head", "o_res_norm", "gate", "up", "swiglu", "down_add")
_DECODE = ("o_gemv_ffn", "o_gemv_res_norm", "gate_up_gemv", "down_gemv_add")


class NamedRun:
    """The ELFs of one layer by name."""

    def __init__(self, bound: LayerRun) -> None:
        self.bound = bound

    def __call__(self, name: str, layer: int, **inputs: Array) -> dict[str, Array]:
        """Run one ELF; returns its outputs by name. Raises UnknownKernel."""
        if name == _ATTENTION + self.bound.suffix:
            return {"attn": self.bound.attention(**inputs)}
        return self.bound.runner(name, layer, **inputs)

    def chain(self, names: Sequence[str], layer: int, **values: Array) -> dict[str, Array]:
        """Run those of the named ELFs that the layer has; outputs feed the inputs of the same name."""
        for block in self.bound.layer:
            if block.name in names:
                values |= self(block.name, layer, **{key: values[key] for key in block.arguments("input")})
        return values


class ProductionFunctions(production.ProductionFunctions):
    """Production functions of a sequence whose layers call ELFs by name."""

    def __init__(self, sequence: Callable[[], Any]) -> None:
        super().__init__(lambda: _bound(sequence()))


def _bound(earlier: Any) -> KernelSequence:
    """The same sequence with layer functions that take a LayerRun."""

    def prefill_blocks(config: ModelConfig, seq_len: int) -> Layer:
        return _layer(earlier.prefill_blocks(config, seq_len))

    def prefill_layer(run: LayerRun, x: Array) -> tuple[Array, Array, Array]:
        out: tuple[Array, Array, Array] = earlier.prefill_layer(NamedRun(run), run.suffix, run.index, x)
        return out

    def decode_layer(run: LayerRun, x: Array) -> Array:
        tables = (run.given["table_q"], run.given["table_k"])
        out: Array = earlier.decode_layer(NamedRun(run), run.index, x, *tables, run.attention)
        return out

    def decode_blocks(config: ModelConfig) -> Layer:
        return _layer(earlier.decode_blocks(config))

    return KernelSequence(prefill_blocks, prefill_layer, decode_blocks, decode_layer, earlier.lm_head)


def _layer(blocks: Sequence[Block]) -> Layer:
    """Attention apart, as it may be the host's; the other ELFs are called by their names."""
    attention = tuple(block for block in blocks if block.name == _ATTENTION)
    others = tuple(block for block in blocks if block.name != _ATTENTION)
    return Layer(qkv=Stage(others, ()), attention=Stage(attention, ("attn",)), ffn=Stage((), ()))


def run_ffn(run: NamedRun, suffix: str, layer: int, attn: Array, residual: Array) -> Array:
    """O+FFN over attn [seq_len, q_dim] and the layer's input [seq_len, emb]; returns the layer's output."""
    names = [name + suffix for name in _PREFILL]
    return run.chain(names, layer, attn=attn, residual=residual)["out"]


def run_ffn_gemv(run: NamedRun, layer: int, attn: Array, residual: Array) -> Array:
    """O+FFN over one row attn [q_dim] and the layer's input [emb]; returns the layer's output [emb]."""
    return run.chain(_DECODE, layer, attn=attn, residual=residual)["out"]


def qkv(config: ModelConfig, *seq_len: int) -> Sequence[Block]:
    """Everything of a layer before attention, of a prompt or (without a length) of one row."""
    of_a_prompt, of_one_row = elfs.qkv_of(config)
    stage = of_a_prompt(config, *seq_len) if seq_len else of_one_row(config)
    return stage.blocks


def rms_gemms_rope(config: ModelConfig, *seq_len: int) -> Block:
    """First ELF of a layer, with bias or per-head norm where the model has them."""
    return qkv(config, *seq_len)[0]


def flash_attn(config: ModelConfig, seq_len: int) -> Sequence[Block]:
    """Attention, empty where the host attends."""
    return elfs.flash_attn(config, seq_len).blocks


def ffn(config: ModelConfig, *seq_len: int) -> Sequence[Block]:
    """Output projection and feed-forward, of a prompt or (without a length) of one row."""
    return (elfs.o_ffn(config, *seq_len) if seq_len else elfs.o_gemv_ffn(config)).blocks


qkv_gemv, rms_gemv_rope, ffn_gemv = qkv, rms_gemms_rope, ffn
