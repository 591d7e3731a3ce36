"""`npu-deploy new` on models it has never seen, then the gates on the twin, with no hand edit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llms.verify.contract.deployment import Deployment
from llms.verify.gates.phase6 import gate as gates
from llms.verify.ladder import Ladder
from npu_deploy.new import new_model
from npu_twin import faults
from tools.odd_models import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PLAIN: dict[str, Any] = {
    "vocab_size": 1003,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Odd:
    """A model as a difference to PLAIN: family, fields, and how its files are written."""

    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    tokenizer_of: str | None = None
    says: str = ""
    planted: tuple[str, ...] = ()


# Small ones: of those of tools.thresholds, what few statistics see. The limits of these models are nobody's
# measurement but their own calibration.
SUBTLE = (
    "rope_one_late",
    "decode_slot_late",
    "attention_hole",
    "query_louder",
    "final_norm_5_percent",
    "rare_bad_tile",
    "decode_norm_bf16_sum",
    "down_low_precision",
)


MODELS = {
    "mha-llama": Odd("llama", planted=SUBTLE),
    "odd-widths-tied-bias-v4": Odd(
        "qwen2",
        {
            "hidden_size": 200,
            "intermediate_size": 344,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        {"v4": True, "seed": 3},
        says="emb_dim 200 padded to 256",
    ),
    "qwen3-norm-head-128-decoupled": Odd(
        "qwen3",
        {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2176},
        {"shards": True},
        tokenizer_of="qwen3_0_6b",
    ),
    "head-32": Odd("llama", {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "head-48-norm": Odd(
        "qwen3", {"head_dim": 48, "num_attention_heads": 4, "num_key_value_heads": 1}, planted=SUBTLE
    ),
    "head-80-bias": Odd(
        "qwen2",
        {"hidden_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2},
        {"v4": True},
        planted=SUBTLE,
    ),
    "head-96": Odd("llama", {"hidden_size": 384, "num_attention_heads": 4, "num_key_value_heads": 1}),
    "head-24": Odd("llama", {"hidden_size": 120, "num_attention_heads": 5, "num_key_value_heads": 5}),
    "head-24-norm": Odd("qwen3", {"head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama3-scaling-tied": Odd(
        "llama",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "vocab_size": 2048},
        tokenizer_of="llama32_1b",
    ),
    "linear-scaling-v4": Odd(
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"v4": True, "shards": True},
    ),
    "short-context": Odd(
        "llama", {"max_position_embeddings": 96, "vocab_size": 2304}, tokenizer_of="smollm2_135m"
    ),
    "forty-positions": Odd("llama", {"max_position_embeddings": 40}),
    "between-two-buckets": Odd(
        "llama",
        {"max_position_embeddings": 200, "num_key_value_heads": 1, "vocab_size": 2304},
        tokenizer_of="smollm2_135m",
    ),
    "output-bias": Odd("llama", {"attention_bias": True, "num_key_value_heads": 1}),
    "bias-and-norm": Odd("qwen3", {"attention_bias": True, "head_dim": 64, "num_key_value_heads": 1}),
    "mistral": Odd("mistral", {"sliding_window": None, "head_dim": 64, "num_key_value_heads": 1}),
    "stored-as-f32": Odd("llama", {"num_key_value_heads": 1}, {"dtype": "float32"}, says="stored as F32"),
    "stored-as-f16": Odd("qwen2", {"num_key_value_heads": 1}, {"dtype": "float16"}, says="stored as F16"),
    "one-head-one-layer": Odd(
        "llama",
        {
            "hidden_size": 64,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "num_hidden_layers": 1,
            "intermediate_size": 100,
        },
    ),
    "wide-feed-forward": Odd("qwen2", {"intermediate_size": 8960, "num_key_value_heads": 1}),
    "wider-than-a-gemv": Odd(
        "llama",
        {"intermediate_size": 18900, "num_hidden_layers": 1, "num_key_value_heads": 1},
        says="down projection of decode in 2 GEMVs",
    ),
    "heads-that-pad-unevenly": Odd(
        "qwen3",
        {"head_dim": 96, "num_attention_heads": 15, "num_key_value_heads": 5, "intermediate_size": 300},
        says="n_kv_heads 5 padded to 6",
    ),
    "seven-heads": Odd("llama", {"hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1}),
}
QUICK = ("odd-widths-tied-bias-v4", "qwen3-norm-head-128-decoupled")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NPU_KERNEL_REGISTRY", "")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_an_unseen_model_passes_the_gates(name: str, tmp_path: Path) -> None:
    odd = MODELS[name]
    tiny = ROOT / "llms" / odd.tokenizer_of / "tiny" if odd.tokenizer_of else None
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, odd.family, {**PLAIN, **odd.fields}, tokenizer=tiny, **odd.files)
    # imported by path: a name of its own per model, as one process holds them all
    made = new_model(str(folder), name="odd_" + name.replace("-", "_"), into=tmp_path / "models")
    assert odd.says in made.text()
    assert made.data["share"]["prefill"] > 0.3

    deployment = Deployment.from_folder(made.data["folder"])
    prompts = deployment.prompts(2)
    outcome = gates.topk_gate(deployment, deployment.hf_reference(), prompts)
    assert outcome.ok, outcome.message
    found, _ = gates.layer_diagnosis(deployment, deployment.hf_reference(), prompts[0])
    assert not gates.diagnosis_problems(found)
    climbed = Ladder(deployment, deployment.hf_reference(), prompts, limits_up_to=0).climb()
    assert climbed.ok, climbed.message
    for fault in odd.planted:
        with faults.find(fault).plant():
            climbed = Ladder(deployment, deployment.hf_reference(), prompts[:1], limits_up_to=0).climb()
        assert not climbed.ok, f"{fault} was seen by no rung"
