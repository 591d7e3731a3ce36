"""What transformers itself says about a checkpoint: tensors of the model, rotary angles, configuration.

An expectation that shares no code with a deployment: the model class is built on the meta device, so no
memory is taken and no weight is read.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MODEL_TENSORS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
"""Weight names of the mlir-air LLM examples (e972f2942) -> tensor names of transformers."""

LAYER_TENSORS = {
    "attn_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "bo": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
}
"""The same of one layer, behind ``model.layers.<index>.``; biases and norms per head where it has them."""


@lru_cache(maxsize=8)
def _meta_model(folder: Path, stamp: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def meta_model(folder: Path) -> Any:
    """The causal language model of an HF folder without weights."""
    return _meta_model(Path(folder), (Path(folder) / "config.json").stat().st_mtime_ns)


def hf_config(folder: Path) -> Any:
    """The configuration as transformers reads it, its own defaults filled in."""
    return meta_model(folder).config


def expected_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the model; a tied head is not listed."""
    model = meta_model(folder)
    found = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    if model.config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    return found


def rotary_tables(folder: Path, positions: int) -> tuple[str, NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Rope type, and cosine, sine and angle [n, head_dim / 2] of transformers' own rotary module, float32.

    n is `positions`, or the model's limit when that is smaller.
    """
    import torch

    model = meta_model(folder)
    n = min(positions, int(model.config.max_position_embeddings))
    rotary = type(model.model.rotary_emb)(config=model.config)
    place = torch.arange(n)[None]
    with torch.inference_mode():
        cosine, sine = rotary(torch.zeros(1, dtype=torch.float32), place)
    half = cosine.shape[-1] // 2
    frequency = rotary.inv_freq.to(torch.float64).numpy()
    angle = np.arange(n)[:, None] * frequency[None, :]
    kind = str((model.config.rope_parameters or {}).get("rope_type", "default"))
    return kind, cosine[0, :, :half].numpy().copy(), sine[0, :, :half].numpy().copy(), angle
