"""Weights of a Llama-family checkpoint: every tensor assigned by name, then laid out for the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from .device_config import device_config, head_columns, pad_array, pad_norm
from .exceptions import ConfigError
from .model_config import ModelConfig

Array = np.ndarray[Any, Any]


@dataclass
class LayerWeights:
    """One decoder layer, bf16, projections as stored by Hugging Face: [out, in].

    Biases exist with `qkv_bias` and `o_bias`, per-head norms with `qk_norm`, otherwise they are None.
    """

    attn_norm: Array
    wq: Array
    wk: Array
    wv: Array
    wo: Array
    ffn_norm: Array
    w_gate: Array
    w_up: Array
    w_down: Array
    bq: Array | None = None
    bk: Array | None = None
    bv: Array | None = None
    bo: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None


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
_BIAS = {
    "bq": ("self_attn.q_proj.bias", "q"),
    "bk": ("self_attn.k_proj.bias", "k"),
    "bv": ("self_attn.v_proj.bias", "k"),
}
_O_BIAS = {"bo": ("self_attn.o_proj.bias", "e")}
_QK_NORM = {"q_norm": ("self_attn.q_norm.weight", "d"), "k_norm": ("self_attn.k_norm.weight", "d")}


def layer_tensors(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Attribute of LayerWeights -> (tensor name inside a layer, its axes) for this architecture."""
    return {
        **_LAYER,
        **(_BIAS if config.qkv_bias else {}),
        **(_O_BIAS if config.o_bias else {}),
        **(_QK_NORM if config.qk_norm else {}),
    }


def _widths(config: ModelConfig) -> dict[str, int]:
    """Length of every axis that `layer_tensors` names."""
    return {
        "e": config.emb_dim,
        "q": config.q_dim,
        "k": config.kv_dim,
        "h": config.hidden_dim,
        "d": config.head_dim,
    }


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this configuration must hold, with its shape."""
    widths = _widths(config)
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.emb_dim)}
    for layer in range(config.n_layers):
        for name, axes in layer_tensors(config).values():
            expected[f"model.layers.{layer}.{name}"] = tuple(widths[axis] for axis in axes)
    expected["model.norm.weight"] = (config.emb_dim,)
    if not config.tied_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, config.emb_dim)
    return expected


def load_weights(tensors: Mapping[str, Array], config: ModelConfig) -> ModelWeights:
    """Assign every expected tensor, rounded to bf16 (to nearest even) where it is stored wider.

    Raises ConfigError naming a tensor that is missing or mis-shaped.
    """
    expected = expected_tensors(config)

    def take(name: str) -> Array:
        if name not in tensors:
            raise ConfigError(f"checkpoint lacks tensor '{name}' (shape {expected[name]})")
        array = tensors[name]
        if tuple(array.shape) != expected[name]:
            raise ConfigError(
                f"tensor '{name}' is {tuple(array.shape)}, the configuration says {expected[name]}"
            )
        return array if array.dtype == bfloat16 else array.astype(bfloat16)

    layers = [
        LayerWeights(
            **{key: take(f"model.layers.{i}.{name}") for key, (name, _) in layer_tensors(config).items()}
        )
        for i in range(config.n_layers)
    ]
    embedding = take("model.embed_tokens.weight")
    head = embedding if config.tied_embeddings else take("lm_head.weight")
    return ModelWeights(embedding, layers, take("model.norm.weight"), head)


def pad_weights(weights: ModelWeights, config: ModelConfig) -> ModelWeights:
    """The same model in the widths of `device_config`; arrays that need no padding are not copied.

    The final norm keeps its real width: it runs on the host.
    """
    c = device_config(config)
    if c == config:
        return weights
    embedding = pad_array(weights.embedding, (config.vocab_size, c.emb_dim))
    tied = weights.lm_head is weights.embedding
    head = embedding if tied else pad_array(weights.lm_head, (config.vocab_size, c.emb_dim))
    layers = [_pad_layer(layer, config, c) for layer in weights.layers]
    return ModelWeights(embedding, layers, weights.final_norm, head)


def _pad_layer(layer: LayerWeights, config: ModelConfig, c: ModelConfig) -> LayerWeights:
    """Rows of projections and biases of heads, and norms per head, keep their halves of each head."""
    heads = {"q": config.n_heads, "k": config.n_kv_heads, "d": 1}
    places = {axis: head_columns(config, count) for axis, count in heads.items()}
    widths = _widths(c)
    padded = {}
    for attribute, (name, axes) in layer_tensors(config).items():
        array, shape = getattr(layer, attribute), tuple(widths[axis] for axis in axes)
        scale = pad_norm if "norm" in name else pad_array
        padded[attribute] = scale(array, shape, places.get(axes[0]))
    return replace(layer, **padded)


def to_gemm_layout(weight: Array) -> Array:
    """[out, in] -> contiguous [in, out], the B operand of a GEMM."""
    return np.ascontiguousarray(weight.T)
