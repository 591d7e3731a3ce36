"""The matched reference in the place of a device, so that everything a gate asks of one can be asked of it.

With its sums in another order (``reorder``) it is a second correct implementation of the deployed arithmetic,
and what the ladder measures on it is what a correct device may measure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llms.verify.contract.records import Array, DecodeProbe, DecodeStepRecord, PrefillRecord
from llms.verify.reference.arithmetic import DeviceArithmetic

_NONE = np.empty(0, np.float32)


class ReferenceRunner:
    """NpuRunner over a `MatchedModel`, with probes and a readable cache.

    ``arithmetic``: what is deployed for a prompt of so many tokens.
    """

    name = "matched reference"

    def __init__(self, model: Any, arithmetic: Callable[[int], DeviceArithmetic]) -> None:
        self.model = model
        self.arithmetic = arithmetic

    def prefill(self, prompt_tokens: Array) -> PrefillRecord:
        """Run a prompt int64[n] from an empty cache."""
        n = len(prompt_tokens)
        with self.model.watched() as seen:
            logits = self.model.prefill([int(token) for token in prompt_tokens], self.arithmetic(n))
        layers = [{"ffn_out": layer[:n]} for layer in seen]
        return PrefillRecord(layers, _NONE, *_widened(logits))

    def decode_step(self, input_token: int, current_pos: int) -> DecodeStepRecord:
        """Run one token; ``current_pos`` must be the next position, as the cache knows no other."""
        return self.decode_step_probed(input_token, current_pos).record

    def decode_step_probed(self, input_token: int, current_pos: int) -> DecodeProbe:
        """The same step with the output of every layer."""
        held = self.model.positions
        if current_pos != held:
            raise ValueError(f"a decode step at position {current_pos}, the cache holds {held} positions")
        with self.model.watched() as seen:
            logits = self.model.decode(int(input_token))
        layers = [{"ffn_out": layer[0]} for layer in seen]
        return DecodeProbe(DecodeStepRecord(*_widened(logits)), layers, _NONE)

    def kv_cache(self) -> tuple[Array, Array]:
        """Copies of K and V, each ``[n_layers, n_kv_heads, positions, head_dim]`` bf16."""
        keys, values = self.model.kv_cache()
        return keys, values


def _widened(logits: Array) -> tuple[Array, int]:
    wide = logits.astype(np.float32)
    return wide, int(np.argmax(wide))
