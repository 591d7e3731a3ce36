"""The sizes of a language model that its timing depends on, read from a Hugging Face configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class UnsupportedModelError(ValueError):
    """The configuration is of a kind that the deployment, and so its timing, does not cover."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder-only model with RMSNorm, SwiGLU and RoPE."""

    n_layers: int
    emb: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.q_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

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
        UnsupportedModelError: for mixture of experts, active sliding windows, latent attention, encoders.
        ValueError: naming a size that is missing or not positive.
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
    kv = fields.get("num_key_value_heads") or fields.get("n_kv_heads") or values["q_heads"]
    head_dim = fields.get("head_dim") or values["emb"] // values["q_heads"]
    deltas = fields.get("deltas") or ()
    kind = str(fields.get("model_type") or "").lower()
    return ModelSizes(
        kv_heads=_positive("num_key_value_heads", kv),
        head_dim=_positive("head_dim", head_dim),
        # Qwen2 has the bias, Qwen3 the norm of queries and keys, without saying so in their configuration
        qkv_bias=bool(
            fields.get("qkv_bias") or fields.get("attention_bias") or kind == "qwen2" or "qkv_bias" in deltas
        ),
        qk_norm=bool(fields.get("qk_norm") or kind == "qwen3" or "qk_norm" in deltas),
        **values,
    )


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
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"model configuration: {name} must be a positive integer, not {value!r}")
    return value


def _refuse(fields: Mapping[str, Any]) -> None:
    reasons = {
        "mixture of experts": any(
            (fields.get(key) or 0) > 1 for key in ("num_experts", "num_local_experts", "n_routed_experts")
        ),
        "an active sliding window": bool(fields.get("sliding_window"))
        and fields.get("use_sliding_window", True),
        "multi-head latent attention": bool(fields.get("kv_lora_rank")),
        "an encoder-decoder": bool(fields.get("is_encoder_decoder")),
    }
    for kind, found in reasons.items():
        if found:
            raise UnsupportedModelError(f"no timing for {kind}: only dense decoder-only models are covered")
