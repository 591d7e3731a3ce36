"""What the checkpoint says, read without the deployment: weights by name, sizes and angles from transformers.

Tensors are read from the files by their Hugging Face names, numbers from transformers' configuration and
angles from its rotary module. Only the layout of padded models (where a column lies on the device) is the
deployment's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16

from llms.checkpoints import load_tensors
from llms.verify.contract.abilities.launch_probe import DeviceLayout
from llms.verify.contract.launches import LayeredWeights, ModelSizes
from llms.verify.contract.records import Array
from llms.verify.reference.hf_facts import LAYER_TENSORS, MODEL_TENSORS, hf_config, rotary_tables

ARGUMENTS = {"norm_w": "attn_norm", "ffn_norm_w": "ffn_norm", "q_norm_w": "q_norm", "k_norm_w": "k_norm"}
"""Argument of a block -> weight, where the names differ."""


class Truth:
    """The model as its checkpoint describes it, in the widths of the device.

    sizes: those of the checkpoint. device: the same as padded. rms_eps: that of the checkpoint.
    """

    def __init__(self, folder: Path, layout: Callable[[ModelSizes], DeviceLayout]) -> None:
        hf = hf_config(folder)
        heads = int(hf.num_attention_heads)
        self.sizes = ModelSizes(
            n_layers=int(hf.num_hidden_layers),
            emb_dim=int(hf.hidden_size),
            hidden_dim=int(hf.intermediate_size),
            n_heads=heads,
            n_kv_heads=int(getattr(hf, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(hf, "head_dim", None) or hf.hidden_size // heads),
            vocab_size=int(hf.vocab_size),
        )
        self.rms_eps = float(hf.rms_norm_eps)
        self._layout = layout(self.sizes)
        self.device = self._layout.sizes
        self._folder = folder
        self._tensors = load_tensors(folder)

    @property
    def eps(self) -> float:
        """eps of the norms over the embedding width: zeros behind a row make its mean square smaller."""
        return self.rms_eps * (self.sizes.emb_dim / self.device.emb_dim)

    @property
    def head_eps(self) -> float:
        """eps of the norms per head."""
        return self.rms_eps * (self.sizes.head_dim / self.device.head_dim)

    @cached_property
    def weights(self) -> LayeredWeights:
        """All weights in bf16, projections [out, in], as the device has them."""
        layers = tuple(self._layer(index) for index in range(self.sizes.n_layers))
        whole = {key: self._take(name) for key, name in MODEL_TENSORS.items() if name in self._tensors}
        head = whole.get("lm_head", whole["embedding"])
        return self._layout.weights(LayeredWeights(whole["embedding"], layers, whole["final_norm"], head))

    def _layer(self, index: int) -> dict[str, Array]:
        names = {key: f"model.layers.{index}.{tail}" for key, tail in LAYER_TENSORS.items()}
        return {key: self._take(name) for key, name in names.items() if name in self._tensors}

    def _take(self, name: str) -> Array:
        array = self._tensors[name]
        return array if array.dtype == bfloat16 else array.astype(bfloat16)

    def table(self, positions: int) -> Array:
        """Rotary rows bf16 [positions, head_dim on the device]: [cos half | sin half], from transformers."""
        _, cosine, sine, _ = rotary_tables(self._folder, positions)
        table = np.zeros((len(cosine), self.device.head_dim), bfloat16)
        table[:, self._layout.head_columns(1)] = np.concatenate([cosine, sine], axis=1).astype(bfloat16)
        return table

    def split_heads(self, array: Array, heads: int) -> Array:
        """[rows, device width] -> [heads, rows, head_dim] of the model."""
        columns = self._layout.head_columns(heads)
        real = np.asarray(array)[:, columns].reshape(array.shape[0], heads, self.sizes.head_dim)
        return np.ascontiguousarray(real.transpose(1, 0, 2))

    def join_heads(self, array: Array) -> Array:
        """[heads, rows, head_dim] -> [rows, query width on the device], the real columns first."""
        heads, rows, d = array.shape
        out = np.zeros((rows, self.device.q_dim), dtype=array.dtype)
        out[:, : heads * d] = array.transpose(1, 0, 2).reshape(rows, heads * d)
        return out
