"""Configuration and weights from a Hugging Face folder."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors import safe_open

NAMES = {
    "attn_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "w_gate": "mlp.gate_proj",
    "w_up": "mlp.up_proj",
    "w_down": "mlp.down_proj",
}


def config_of(folder):
    """The fields the kernels need."""
    c = json.loads((Path(folder) / "config.json").read_text())
    rope = c.get("rope_parameters") or {"rope_theta": c.get("rope_theta", 10000.0)}
    return SimpleNamespace(
        n_layers=c["num_hidden_layers"],
        emb_dim=c["hidden_size"],
        n_heads=c["num_attention_heads"],
        n_kv_heads=c["num_key_value_heads"],
        head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        rms_eps=c["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
    )


def load_weights(folder, n_layers):
    """Embedding, layers, final norm, head as float32."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors.update(
                {name: file.get_tensor(name).to(torch.float32).numpy() for name in list(file.keys())}
            )
    layers = [
        {ours: tensors[f"model.layers.{i}.{theirs}.weight"] for ours, theirs in NAMES.items()}
        for i in range(n_layers)
    ]
    embedding = tensors["model.embed_tokens.weight"]
    return SimpleNamespace(
        embedding=embedding,
        layers=layers,
        final_norm=tensors["model.norm.weight"],
        head=tensors.get("lm_head.weight", embedding),
    )


def rope_table(config, length):
    """[length, head_dim] = cos | sin."""
    half = config.head_dim // 2
    rates = config.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
