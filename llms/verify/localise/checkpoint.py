"""What the checkpoint says, read without the deployment: weights by name, sizes and angles from transformers.

Tensors are read from the files by their Hugging Face names, numbers from transformers' configuration and
angles from its rotary module. Only the layout of padded models (where a column of a head lies on the device)
is taken from the toolkit.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llms.checkpoints import load_tensors
from llms.llama_kernel_builder.device_config import device_config, norm_eps, pad_table
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.weights import LayerWeights, ModelWeights, pad_weights
from llms.verify.reference.hf_facts import hf_config, rotary_tables

Array = np.ndarray[Any, Any]

_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "bo": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
ARGUMENTS = {"norm_w": "attn_norm", "ffn_norm_w": "ffn_norm", "q_norm_w": "q_norm", "k_norm_w": "k_norm"}
"""Argument of a block -> weight, where the names differ."""


class Truth:
    """The model as its checkpoint describes it, in the widths of the device."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        hf = hf_config(folder)
        self.hf = hf
        heads = int(hf.num_attention_heads)
        # the deployment's own configuration gives what has no meaning for the arithmetic
        self.config = replace(
            config,
            n_layers=int(hf.num_hidden_layers),
            emb_dim=int(hf.hidden_size),
            hidden_dim=int(hf.intermediate_size),
            n_heads=heads,
            n_kv_heads=int(getattr(hf, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(hf, "head_dim", None) or hf.hidden_size // heads),
            rms_eps=float(hf.rms_norm_eps),
            vocab_size=int(hf.vocab_size),
        )
        self.device = device_config(self.config)
        self._folder = folder
        self._tensors = load_tensors(folder)

    @property
    def eps(self) -> float:
        """eps of the norms over the embedding width."""
        return norm_eps(self.config.emb_dim, self.device.emb_dim, self.config.rms_eps)

    @property
    def head_eps(self) -> float:
        """eps of the norms per head."""
        return norm_eps(self.config.head_dim, self.device.head_dim, self.config.rms_eps)

    @cached_property
    def weights(self) -> ModelWeights:
        """All weights in bf16, projections [out, in]."""
        layers = [self._layer(index) for index in range(self.config.n_layers)]
        embedding = self._take("model.embed_tokens.weight")
        tied = "lm_head.weight" not in self._tensors
        head = embedding if tied else self._take("lm_head.weight")
        whole = ModelWeights(embedding, layers, self._take("model.norm.weight"), head)
        return pad_weights(whole, self.config)

    def _layer(self, index: int) -> LayerWeights:
        names = {key: f"model.layers.{index}.{tail}" for key, tail in _NAMES.items()}
        return LayerWeights(**{key: self._take(name) for key, name in names.items() if name in self._tensors})

    def _take(self, name: str) -> Array:
        array = self._tensors[name]
        return array if array.dtype == bfloat16 else array.astype(bfloat16)

    def table(self, positions: int) -> Array:
        """Rotary rows bf16 [positions, head_dim on the device]: [cos half | sin half], from transformers."""
        _, cosine, sine, _ = rotary_tables(self._folder, positions)
        rows = np.concatenate([cosine, sine], axis=1).astype(bfloat16)
        return pad_table(rows, self.device.head_dim)

    def named(self, layer: int) -> dict[str, Array]:
        """Weights of one layer by name."""
        weights = self.weights.layers[layer]
        return {f.name: a for f in fields(weights) if (a := getattr(weights, f.name)) is not None}
