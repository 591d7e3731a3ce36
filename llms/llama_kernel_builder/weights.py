"""Weights of a Llama-family checkpoint: every tensor assigned by name, then laid out for the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from .device_config import device_config, head_columns, pad_matrix, pad_norm, pad_vector
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


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this configuration must hold, with its shape."""
    widths = {
        "e": config.emb_dim,
        "q": config.q_dim,
        "k": config.kv_dim,
        "h": config.hidden_dim,
        "d": config.head_dim,
    }
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
    embedding = pad_matrix(weights.embedding, (config.vocab_size, c.emb_dim))
    tied = weights.lm_head is weights.embedding
    head = embedding if tied else pad_matrix(weights.lm_head, (config.vocab_size, c.emb_dim))
    layers = [_pad_layer(layer, config, c) for layer in weights.layers]
    return ModelWeights(embedding, layers, weights.final_norm, head)


def _pad_layer(layer: LayerWeights, config: ModelConfig, c: ModelConfig) -> LayerWeights:
    q, kv = head_columns(config, config.n_heads), head_columns(config, config.n_kv_heads)
    one = head_columns(config, 1)
    padded = {
        "attn_norm": pad_norm(layer.attn_norm, c.emb_dim),
        "ffn_norm": pad_norm(layer.ffn_norm, c.emb_dim),
        "wq": pad_matrix(layer.wq, (c.q_dim, c.emb_dim), rows=q),
        "wk": pad_matrix(layer.wk, (c.kv_dim, c.emb_dim), rows=kv),
        "wv": pad_matrix(layer.wv, (c.kv_dim, c.emb_dim), rows=kv),
        "wo": pad_matrix(layer.wo, (c.emb_dim, c.q_dim)),
        "w_gate": pad_matrix(layer.w_gate, (c.hidden_dim, c.emb_dim)),
        "w_up": pad_matrix(layer.w_up, (c.hidden_dim, c.emb_dim)),
        "w_down": pad_matrix(layer.w_down, (c.emb_dim, c.hidden_dim)),
    }
    for name, width, index in (("bq", c.q_dim, q), ("bk", c.kv_dim, kv), ("bv", c.kv_dim, kv)):
        bias = getattr(layer, name)
        if bias is not None:
            padded[name] = pad_vector(bias, width, index)
    if layer.bo is not None:
        padded["bo"] = pad_vector(layer.bo, c.emb_dim)
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name)
        if norm is not None:
            padded[name] = pad_norm(norm, c.head_dim, one)
    unknown = {f.name for f in fields(layer)} - set(padded) - {"bq", "bk", "bv", "bo", "q_norm", "k_norm"}
    if unknown:
        raise ConfigError(f"no padding rule for {', '.join(sorted(unknown))}")
    return replace(layer, **padded)


def to_gemm_layout(weight: Array) -> Array:
    """[out, in] -> contiguous [in, out], the B operand of a GEMM."""
    return np.ascontiguousarray(weight.T)
