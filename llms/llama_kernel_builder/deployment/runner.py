"""The runner that gates drive: it calls a model's production functions and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llms.llama_kernel_builder import host_ops
from llms.llama_kernel_builder.deployment.arithmetic_of import describe_arithmetic
from llms.llama_kernel_builder.deployment.forms import SessionForms
from llms.llama_kernel_builder.deployment.performance import SessionPerformance
from llms.llama_kernel_builder.deployment.probe import SessionProbe
from llms.llama_kernel_builder.deployment.session import Session
from llms.llama_kernel_builder.exceptions import BadArgument
from llms.llama_kernel_builder.llama_loop import BUCKETS, bucket_for
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.verify.contract.abilities.forms import Forms
from llms.verify.contract.abilities.performance import Performance
from llms.verify.contract.records import DecodeProbe, DecodeStepRecord, PrefillRecord
from llms.verify.reference.arithmetic import DeviceArithmetic

Array = np.ndarray[Any, Any]


class ProductionRunner:
    """NpuRunner over a Session.

    `prefill` resets all per-prompt state; `decode_step` before it is an error. In lite mode no
    layer outputs are collected. Logits and hidden states are handed over as float32. `published`: the
    configuration that the model folder states, where it is known.
    """

    def __init__(
        self, name: str, session: Session, *, lite_mode: bool = False, published: ModelConfig | None = None
    ) -> None:
        self.name = name
        self.published = published
        self.session = session
        self.lite_mode = lite_mode

    def prepare(self, prompt_len: int) -> None:
        """Compile and preload what a prompt of this length needs; opens no hardware context."""
        self.session.prepare(prompt_len)

    def prefill(self, prompt_tokens: Array) -> PrefillRecord:
        """Run the prompt int64[n] through the production prefill."""
        ids = [int(token) for token in prompt_tokens]
        self.session.prepare(len(ids))
        layers: list[Array] | None = None if self.lite_mode else []
        token, logits, length = self.session.prefill(ids, layers)
        if length != len(ids):
            # A gate counts positions itself; whoever generates starts where the production prefill says.
            raise BadArgument(
                f"prefill of {len(ids)} tokens returned prompt length {length}: decoding would start at the "
                "wrong position; count every token id, end-of-turn tokens of a chat template included"
            )
        return PrefillRecord(
            layer_intermediates=_named(layers),
            final_hidden_normed=self._normed(layers[-1]) if layers else np.empty(0, np.float32),
            logits_at_pred=host_ops.widen(logits),
            top1_token=token,
        )

    def decode_step(self, input_token: int, current_pos: int) -> DecodeStepRecord:
        """Run one production decode step at `current_pos`."""
        return self._decode(input_token, current_pos, None)

    def decode_step_probed(self, input_token: int, current_pos: int) -> DecodeProbe:
        """The same step with the output of every layer."""
        layers: list[Array] = []
        record = self._decode(input_token, current_pos, layers)
        return DecodeProbe(record, _named(layers), self._normed(layers[-1][None])[0])

    def kv_cache(self) -> tuple[Array, Array]:
        """Copies of K and V, each [n_layers, n_kv_heads, max_seq, head_dim] bf16."""
        keys, values = self.session.kv_cache
        return keys.copy(), values.copy()

    def device_arithmetic(self, prompt_len: int) -> DeviceArithmetic:
        """Which arithmetic a prompt of this length meets, as deployed (for the matched reference)."""
        session = self.session
        bucket = bucket_for(prompt_len, session.config.max_position)
        return describe_arithmetic(session.module.SEQUENCE, session.config, bucket, npu_attn=session.npu_attn)

    def prompt_limits(self) -> tuple[int, ...]:
        """Compiled prompt lengths up to the KV cache, ascending; a prompt past the last one is an error."""
        largest = self.session.max_seq
        return (*(bucket for bucket in BUCKETS if bucket < largest), largest)

    def weight_ledger(self) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Array]]:
        """Tensors read, tensors not read, and what every weight holds in bf16 (`layers.0.wq` -> array)."""
        session = self.session
        ledger = session.tensors.ledger()
        weights = session.loaded
        held = {name: getattr(weights, name) for name in ("embedding", "final_norm", "lm_head")}
        for index, layer in enumerate(weights.layers):
            held.update({f"layers.{index}.{name}": a for name, a in vars(layer).items() if a is not None})
        return ledger.loaded, ledger.unused, held

    def rope_table(self) -> Array:
        """The rotary table in use: float32 [positions, head_dim], a row is [cos half | sin half]."""
        return host_ops.widen(self.session.rope_lut)

    def forms(self) -> Forms:
        """The unfused, the merged and the production form of this model, for phases 3 to 5."""
        return SessionForms(self.session)

    def performance(self, tokenise: Callable[[], Sequence[int]], n_tokens: int) -> Performance:
        """Prepare for a prompt of `n_tokens` tokens, which `tokenise` gives; nothing of it is timed."""
        self.session.prepare(n_tokens)
        return SessionPerformance(self.session, tokenise, n_tokens, self.published)

    def launch_probe(self) -> SessionProbe:
        """Single launches as they run, for the bisect."""
        return SessionProbe(self.session)

    def close(self) -> None:
        """Release the device."""
        self.session.close()

    def _decode(self, token: int, position: int, layers: list[Array] | None) -> DecodeStepRecord:
        chosen, logits = self.session.decode(int(token), int(position), layers)
        return DecodeStepRecord(lm_head_logits=host_ops.widen(logits), top1_token=chosen)

    def _normed(self, hidden: Array) -> Array:
        session = self.session
        rows = [
            host_ops.final_rms_norm(session.profiler, row, session.weights.final_norm, session.config.rms_eps)
            for row in hidden
        ]
        return host_ops.widen(np.stack(rows))


def _named(layers: list[Array] | None) -> list[dict[str, Array]]:
    return [{"ffn_out": host_ops.widen(layer)} for layer in layers or ()]
