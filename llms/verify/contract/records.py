"""What one side of a comparison hands over: records of a prefill and of a decode step.

Names and fields are those of the LLM examples of Xilinx/mlir-air (e972f2942, ``programming_examples/llms``),
so that a runner written for them works here and the other way round. Two things differ on purpose:

* a record *copies* every array when it is built and then makes the copy read-only. A device runtime reuses
  its output buffers, so a view that is kept shows the last layer (or the next prompt) instead of what was
  recorded;
* what goes beyond those fields, such as the layer outputs of a decode step, comes from an optional method of
  the runner (see :class:`ProbedRunner`), never from extra fields that a foreign runner would not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def frozen_copy(values: object) -> Array:
    """Return a C-contiguous, read-only copy of ``values`` that shares memory with nothing."""
    copied: Array = np.array(values, copy=True, order="C", subok=False)
    copied.setflags(write=False)
    return copied


def _frozen_layers(layers: Sequence[Mapping[str, object]]) -> list[dict[str, Array]]:
    return [{name: frozen_copy(values) for name, values in layer.items()} for layer in layers]


@dataclass(frozen=True, eq=False)
class PrefillRecord:
    """The outcome of one prefill.

    Attributes:
        layer_intermediates: one dict per layer; key ``ffn_out`` is the block output after the second
            residual, ``[n, emb]``, real positions only. Empty list in lite mode.
        final_hidden_normed: ``[n, emb]`` after the final norm; size 0 in lite mode.
        logits_at_pred: ``[vocab]``, logits of the last real position.
        top1_token: the token the side chose, argmax of ``logits_at_pred``.
    """

    layer_intermediates: list[dict[str, Array]]
    final_hidden_normed: Array
    logits_at_pred: Array
    top1_token: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_intermediates", _frozen_layers(self.layer_intermediates))
        object.__setattr__(self, "final_hidden_normed", frozen_copy(self.final_hidden_normed))
        object.__setattr__(self, "logits_at_pred", frozen_copy(self.logits_at_pred))
        object.__setattr__(self, "top1_token", int(self.top1_token))

    @classmethod
    def copy_of(cls, record: Any) -> PrefillRecord:
        """Copy any object that has the four fields (a foreign adapter brings its own record class)."""
        return cls(
            layer_intermediates=record.layer_intermediates,
            final_hidden_normed=record.final_hidden_normed,
            logits_at_pred=record.logits_at_pred,
            top1_token=record.top1_token,
        )


@dataclass(frozen=True, eq=False)
class DecodeStepRecord:
    """The outcome of one decode step: ``lm_head_logits`` ``[vocab]`` and the token chosen from it."""

    lm_head_logits: Array
    top1_token: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "lm_head_logits", frozen_copy(self.lm_head_logits))
        object.__setattr__(self, "top1_token", int(self.top1_token))

    @classmethod
    def copy_of(cls, record: Any) -> DecodeStepRecord:
        """Copy any object that has the two fields."""
        return cls(lm_head_logits=record.lm_head_logits, top1_token=record.top1_token)


@dataclass(frozen=True, eq=False)
class DecodeProbe:
    """Inside view of one decode step, for diagnosis.

    Attributes:
        record: the ordinary record of the same step.
        layer_intermediates: one dict per layer, ``ffn_out`` is ``[emb]``, the block output after the second
            residual.
        final_hidden_normed: ``[emb]`` after the final norm, or size 0 when not offered.
    """

    record: DecodeStepRecord
    layer_intermediates: list[dict[str, Array]]
    final_hidden_normed: Array = field(default_factory=lambda: np.empty(0, np.float32))

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_intermediates", _frozen_layers(self.layer_intermediates))
        object.__setattr__(self, "final_hidden_normed", frozen_copy(self.final_hidden_normed))


@runtime_checkable
class NpuRunner(Protocol):
    """What ``build_runner`` of an adapter returns. Structural: a foreign class need not know this one."""

    name: str

    def prefill(self, prompt_tokens: NDArray[np.int64]) -> PrefillRecord:
        """Run the prompt ``int64[n]`` through the production prefill; resets all per-prompt state."""

    def decode_step(self, input_token: int, current_pos: int) -> DecodeStepRecord:
        """Run one production decode step; ``current_pos`` of the first one is the number of prompt tokens."""


@runtime_checkable
class ProbedRunner(Protocol):
    """Optional ability of a runner: a decode step that also shows what every layer put out."""

    def decode_step_probed(self, input_token: int, current_pos: int) -> DecodeProbe:
        """As ``decode_step``, by the same production functions, with the outputs of all layers copied."""
