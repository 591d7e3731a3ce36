"""Model configuration: both transformers forms, nothing defaulted, out-of-scope models refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llms.llama_kernel_builder.exceptions import ConfigError
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.rope_table import inverse_frequencies, rope_table

V4: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def changed(**fields: Any) -> dict[str, Any]:
    data = {**V4, **fields}
    return {key: value for key, value in data.items() if value != "absent"}


def v5(**rope: Any) -> dict[str, Any]:
    data = changed(rope_theta="absent", rope_scaling="absent", torch_dtype="absent")
    return {
        **data,
        "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **rope},
    }


def test_both_forms_read_the_same() -> None:
    assert ModelConfig.from_hf_dict(V4) == ModelConfig.from_hf_dict(v5())
    old = ModelConfig.from_hf_dict(changed(rope_scaling=LLAMA3))
    assert old == ModelConfig.from_hf_dict(v5(**LLAMA3))
    assert old.rope_scaling.kind == "llama3"


@pytest.mark.parametrize("field", sorted(set(V4) - {"rope_scaling", "torch_dtype"}))
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        ModelConfig.from_hf_dict(changed(**{field: "absent"}), source="config.json")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "MoE is out of scope"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent attention"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is out of scope"),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "sliding window"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "cannot be grouped"),
        ({"num_hidden_layers": "2"}, "expected int"),
        ({"hidden_size": True}, "expected int"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "contradicts"),
    ],
)
def test_out_of_scope_or_contradictory(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ModelConfig.from_hf_dict(changed(**fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"hidden_act": "gelu_new"}, "gelu_new"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ({"layer_norm_eps": 1e-5}, "LayerNorm"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding window"),
        ({"partial_rotary_factor": 0.75}, "rotary"),
        ({"num_experts": 64}, "MoE"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"num_key_value_heads": 3}, "heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"hidden_size": 257}, "heads"),
    ],
)
def test_what_no_prediction_and_no_deployment_covers(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ModelConfig.from_hf_dict(changed(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 2},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 1.0},
    ],
)
def test_what_changes_no_shape_is_in_scope(fields: dict[str, Any]) -> None:
    assert ModelConfig.from_hf_dict(changed(**fields)).q_dim == 256


def test_inactive_sliding_window_is_in_scope() -> None:
    data = changed(model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    assert ModelConfig.from_hf_dict(data).qkv_bias


def test_explicit_head_dim_decouples_the_query_width() -> None:
    config = ModelConfig.from_hf_dict(changed(head_dim=128))
    assert (config.head_dim, config.q_dim, config.kv_dim, config.emb_dim) == (128, 512, 256, 256)


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V4))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert ModelConfig.from_hf_folder(tmp_path).eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("text", "error"), [(None, "does not exist"), ("{", "is no JSON"), ("[]", "expected an object")]
)
def test_unreadable_config_file(tmp_path: Path, text: str | None, error: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=error):
        ModelConfig.from_hf_folder(tmp_path)


def test_rope_table_against_the_definition() -> None:
    config = ModelConfig.from_hf_dict(V4)
    table = rope_table(config, 50).astype(np.float64)
    for position, pair in ((0, 0), (7, 3), (49, 31)):
        angle = position / 10000.0 ** (2 * pair / 64)
        assert table[position, pair] == pytest.approx(math.cos(angle), abs=4e-3)
        assert table[position, 32 + pair] == pytest.approx(math.sin(angle), abs=4e-3)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_scaled_frequencies_equal_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = LLAMA3 if kind == "llama3" else {"rope_type": "linear", "factor": 4.0}
    hf_fields = {
        key: value
        for key, value in V4.items()
        if key not in ("torch_dtype", "model_type", "rope_scaling", "rope_theta")
    }
    hf = LlamaConfig(**hf_fields, rope_parameters={**scaling, "rope_theta": 10000.0})
    expected, _ = ROPE_INIT_FUNCTIONS[kind](hf, device="cpu")
    mine = inverse_frequencies(ModelConfig.from_hf_dict(changed(rope_scaling=scaling)))
    np.testing.assert_allclose(mine, expected.numpy(), rtol=2e-6)
    plain = inverse_frequencies(ModelConfig.from_hf_dict(V4))
    assert np.abs(mine / plain - 1).max() > 0.5
