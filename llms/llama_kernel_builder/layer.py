"""A layer as a model writes it: which ELFs each stage has, and the stages bound to one layer's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .block import Block

if TYPE_CHECKING:
    from .block_runner import BlockRunner

Array = np.ndarray[Any, Any]
Attend = Callable[[Array, Array, Array], Array]


@dataclass(frozen=True)
class Stage:
    """ELFs that run one after the other, outputs into inputs of the same name, and what comes out, in order.

    Without ELFs the host computes it.
    """

    blocks: tuple[Block, ...]
    outputs: tuple[str, ...]


ON_HOST = Stage((), ("attn",))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The ELFs of one layer; iterating gives them in the order of execution.

    qkv: normed input to Q and K after RoPE, and V. attention: attended heads; on the host when not given.
    ffn: output projection to the layer's output.
    """

    qkv: Stage
    attention: Stage = ON_HOST
    ffn: Stage

    def __iter__(self) -> Iterator[Block]:
        for stage in (self.qkv, self.attention, self.ffn):
            yield from stage.blocks

    def map(self, change: Callable[[Block], Block]) -> Layer:
        """The same layer with `change(block)` for every ELF."""
        stages = {
            name: replace(stage, blocks=tuple(change(block) for block in stage.blocks))
            for name, stage in vars(self).items()
        }
        return Layer(**stages)


class LayerRun:
    """The stages of layer `index`, ready to run.

    A layer is ``q, k, v = run.qkv(x)``, then ``run.ffn(run.attention(q, k, v), residual=x)``, of a prompt and
    of a decode step. Arrays are bf16, [seq_len, width] or [width], of the padded widths of `device_config`.

    suffix: of the ELFs' names, from the compiled length. attend: attention of the host, instead of an ELF.
    given: arguments that change with every call (the rotary rows of a decode step).
    """

    def __init__(
        self, runner: BlockRunner, suffix: str, index: int, attend: Attend | None = None, **given: Array
    ) -> None:
        self.runner = runner
        self.suffix = suffix
        self.index = index
        self.layer = runner.layer(suffix)
        self.attend = attend
        self.given = given

    def qkv(self, x: Array) -> tuple[Array, Array, Array]:
        """Q and K after RoPE, and V, of the layer's input."""
        q, k, v = self.runner.run(self.layer.qkv, self.index, x=x, **self.given)
        return q, k, v

    def attention(self, q: Array, k: Array, v: Array) -> Array:
        """Attended heads. In a decode step K and V go into the KV cache, which is what is attended to."""
        if self.attend is not None:
            return self.attend(q, k, v)
        (attn,) = self.runner.run(self.layer.attention, self.index, q=q, k=k, v=v)
        return attn

    def ffn(self, attn: Array, *, residual: Array) -> Array:
        """Output projection and feed-forward, each with its residual: the layer's output."""
        (out,) = self.runner.run(self.layer.ffn, self.index, attn=attn, residual=residual)
        return out
