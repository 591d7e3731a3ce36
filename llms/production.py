"""Names that folders of earlier scaffolds import, and the form that their layers have.

Their layer functions call ELFs by name: ``run("flash_attn_s128", layer, q=q, k=k, v=v)["attn"]``. New folders
have `llms.llama_kernel_builder.layer.LayerRun` and
`llms.llama_kernel_builder.deployment.production.ProductionFunctions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llms.llama_kernel_builder.block import Block
from llms.llama_kernel_builder.deployment import production
from llms.llama_kernel_builder.layer import Array, Layer, LayerRun, Stage
from llms.llama_kernel_builder.llama_loop import KernelSequence
from llms.llama_kernel_builder.model_config import ModelConfig

__all__ = ["NamedRun", "ProductionFunctions"]

_ATTENTION = "flash_attn"


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
                given = [buffer.name for buffer in block.buffers if buffer.role == "input"]
                values.update(self(block.name, layer, **{key: values[key] for key in given}))
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
