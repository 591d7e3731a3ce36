"""The sizes of a language model that its timing depends on, read from a Hugging Face configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LARGEST = 1 << 20
"""No size of a model is above this."""
ROPE_TYPES = ("default", "llama3", "linear")
DEVICE_HEAD_DIMS = (64, 128)
"""Head sizes with a published prefill attention kernel; a deployment attends others on the host."""


class UnsupportedModelError(ValueError):
    """The configuration is of a kind that the deployment, and so its timing, does not cover."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder-only model with RMSNorm, SwiGLU and RoPE.

    `unpadded_attention` is for sizes that are padded for the device: the width of all query heads and of all
    key heads of the model itself, where its own head size has no attention kernel and the host attends.
    """

    n_layers: int
    emb: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    qkv_bias: bool = False
    qk_norm: bool = False
    unpadded_attention: tuple[int, int] | None = None

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.q_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def host_attention(self) -> tuple[int, int] | None:
        """Width of all query heads and of all key heads that the host attends in a prefill, or None."""
        if self.unpadded_attention is None and self.head_dim not in DEVICE_HEAD_DIMS:
            return self.q_dim, self.kv_dim
        return self.unpadded_attention

    @property
    def parameters(self) -> int:
        """Number of weights of the layers and of one vocabulary matrix."""
        layer = self.emb * (2 * self.q_dim + 2 * self.kv_dim) + 3 * self.emb * self.hidden
        return self.n_layers * layer + self.vocab * self.emb


_KEYS: dict[str, tuple[str, ...]] = {
    "n_layers": ("num_hidden_layers", "n_layers"),
    "emb": ("hidden_size", "emb_dim"),
    "q_heads": ("num_attention_heads", "n_q_heads", "n_heads"),
    "hidden": ("intermediate_size", "hidden_dim"),
    "vocab": ("vocab_size",),
}


def read_sizes(config: object) -> ModelSizes:
    """Return the sizes in a configuration: a mapping, a Hugging Face config object or a dataclass.

    Both the names of Hugging Face (`hidden_size`, ...) and those of the toolkit and of the published model
    records (`emb_dim`, ...) are understood.

    Raises:
        UnsupportedModelError: with a sentence, for what is no dense decoder-only model with full attention,
            RMSNorm, SwiGLU and RoPE of a known type.
        ValueError: naming a size that is missing, not positive or at odds with another.
    """
    if isinstance(config, ModelSizes):
        return config
    fields = _fields(config)
    _refuse(fields)
    values: dict[str, int] = {}
    for name, keys in _KEYS.items():
        found = next((fields[key] for key in keys if fields.get(key) is not None), None)
        if found is None:
            raise ValueError(f"model configuration: no {' or '.join(keys)}")
        values[name] = _positive(keys[0], found)
    kv = _positive(
        "num_key_value_heads",
        fields.get("num_key_value_heads") or fields.get("n_kv_heads") or values["q_heads"],
    )
    head_dim = fields.get("head_dim")
    if head_dim is None:
        if values["emb"] % values["q_heads"]:
            raise ValueError(
                f"model configuration: no head_dim, and hidden_size {values['emb']} is no multiple of "
                f"{values['q_heads']} heads"
            )
        head_dim = values["emb"] // values["q_heads"]
    if _positive("head_dim", head_dim) % 2:
        raise ValueError(f"model configuration: RoPE needs an even head_dim, not {head_dim}")
    if values["q_heads"] % kv:
        raise ValueError(f"model configuration: {values['q_heads']} query heads cannot share {kv} key heads")
    deltas = _deltas(fields)
    kind = str(fields.get("model_type") or "").lower()
    return ModelSizes(
        n_layers=values["n_layers"],
        emb=values["emb"],
        q_heads=values["q_heads"],
        kv_heads=kv,
        head_dim=head_dim,
        hidden=values["hidden"],
        vocab=values["vocab"],
        # Qwen2 has the bias, Qwen3 the norm of queries and keys, without saying so in their configuration
        qkv_bias=bool(
            fields.get("qkv_bias") or fields.get("attention_bias") or kind == "qwen2" or "qkv_bias" in deltas
        ),
        qk_norm=bool(fields.get("qk_norm") or kind == "qwen3" or "qk_norm" in deltas),
    )


def _deltas(fields: Mapping[str, Any]) -> str:
    """What a published record says in words about its differences from the plain family."""
    deltas = fields.get("deltas") or ()
    return "; ".join(map(str, [deltas] if isinstance(deltas, str) else deltas)).lower()


_DELTAS_OUT_OF_SCOPE = {
    "sliding window": "an active sliding window",
    "gelu": "the activation gelu",
    "layernorm": "LayerNorm",
    "partial rotary": "RoPE on a part of a head",
    "longrope": "the RoPE type longrope",
    "yarn": "the RoPE type yarn",
    "experts": "mixture of experts",
    "fused decode": "a decode step in one program",
}


def _fields(config: object) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        return dict(to_dict())
    return dict(vars(config))


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST:
        raise ValueError(
            f"model configuration: {name} must be a whole number from 1 to {LARGEST}, not {value!r}"
        )
    return value


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_FULL_ATTENTION_UNLESS_ASKED = ("qwen2", "qwen3")
"""Families whose configuration names a window that is not in use."""


def _refuse(fields: Mapping[str, Any]) -> None:
    reason = next(_reasons(fields), None)
    if reason:
        raise UnsupportedModelError(
            f"no timing for {reason}: only dense decoder-only models with full attention, RMSNorm, SwiGLU "
            f"and RoPE (types: {', '.join(ROPE_TYPES)}) are covered"
        )


def _reasons(fields: Mapping[str, Any]) -> Iterator[str]:
    family = str(fields.get("model_type") or "").lower()
    if fields.get("is_encoder_decoder"):
        yield "an encoder-decoder"
    if any((fields.get(key) or 0) > 1 for key in _EXPERTS):
        yield "mixture of experts"
    if fields.get("kv_lora_rank"):
        yield "multi-head latent attention"
    deltas = _deltas(fields)
    yield from (reason for words, reason in _DELTAS_OUT_OF_SCOPE.items() if words in deltas)
    window = fields.get("sliding_window")
    used = fields.get("use_sliding_window", family not in _FULL_ATTENTION_UNLESS_ASKED)
    kinds = {str(kind) for kind in fields.get("layer_types") or ()} - {"full_attention"}
    if (window and used) or any("sliding" in kind for kind in kinds):
        yield "an active sliding window"
    if kinds:
        yield f"layers of the type {min(kinds)}"
    activation = str(fields.get("hidden_activation") or fields.get("hidden_act") or "silu").lower()
    if activation not in ("silu", "swish"):
        yield f"the activation {activation}"
    epsilon = any(fields.get(key) is not None for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps"))
    if epsilon and fields.get("rms_norm_eps") is None:
        yield "LayerNorm"
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = "default"
    if isinstance(rope, Mapping):
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
    elif isinstance(rope, str):
        return  # a published record describes it in words
    if kind not in ROPE_TYPES:
        yield f"the RoPE type {kind}"
    if fields.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        yield "RoPE on a part of a head"
