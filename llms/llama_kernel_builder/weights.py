"""Weights of a Llama-family checkpoint, in the layouts the kernels want."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .exceptions import ConfigError
from .model_config import ModelConfig

Array = np.ndarray[Any, Any]


@dataclass
class LayerWeights:
    """One decoder layer, bf16, projections as stored by Hugging Face: [out, in]."""

    attn_norm: Array
    wq: Array
    wk: Array
    wv: Array
    wo: Array
    ffn_norm: Array
    w_gate: Array
    w_up: Array
    w_down: Array


@dataclass
class ModelWeights:
    """A whole model: embedding [vocab, emb], layers, final norm [emb], LM head [vocab, emb]."""

    embedding: Array
    layers: list[LayerWeights]
    final_norm: Array
    lm_head: Array


_LAYER = {
    "attn_norm": ("input_layernorm.weight", "e"),
    "wq": ("self_attn.q_proj.weight", "qe"),
    "wk": ("self_attn.k_proj.weight", "ke"),
    "wv": ("self_attn.v_proj.weight", "ke"),
    "wo": ("self_attn.o_proj.weight", "eq"),
    "ffn_norm": ("post_attention_layernorm.weight", "e"),
    "w_gate": ("mlp.gate_proj.weight", "he"),
    "w_up": ("mlp.up_proj.weight", "he"),
    "w_down": ("mlp.down_proj.weight", "eh"),
}


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this configuration must hold, with its shape."""
    widths = {"e": config.emb_dim, "q": config.q_dim, "k": config.kv_dim, "h": config.hidden_dim}
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.emb_dim)}
    for layer in range(config.n_layers):
        for name, axes in _LAYER.values():
            expected[f"model.layers.{layer}.{name}"] = tuple(widths[axis] for axis in axes)
    expected["model.norm.weight"] = (config.emb_dim,)
    if not config.tied_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, config.emb_dim)
    return expected


def load_weights(tensors: Mapping[str, Array], config: ModelConfig) -> ModelWeights:
    """Assign every expected tensor. Raises ConfigError naming a tensor that is missing or mis-shaped."""
    expected = expected_tensors(config)

    def take(name: str) -> Array:
        if name not in tensors:
            raise ConfigError(f"checkpoint lacks tensor '{name}' (shape {expected[name]})")
        array = tensors[name]
        if tuple(array.shape) != expected[name]:
            raise ConfigError(
                f"tensor '{name}' is {tuple(array.shape)}, the configuration says {expected[name]}"
            )
        return array

    layers = [
        LayerWeights(**{key: take(f"model.layers.{i}.{name}") for key, (name, _) in _LAYER.items()})
        for i in range(config.n_layers)
    ]
    embedding = take("model.embed_tokens.weight")
    head = embedding if config.tied_embeddings else take("lm_head.weight")
    return ModelWeights(embedding, layers, take("model.norm.weight"), head)


def to_gemm_layout(weight: Array) -> Array:
    """[out, in] -> contiguous [in, out], the B operand of a GEMM."""
    return np.ascontiguousarray(weight.T)
