"""Phase 0 on checkpoints that are right, and with one thing wrong at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llms.llama_kernel_builder import driver, rope_table, weights
from llms.llama_kernel_builder.model_config import ModelConfig, RopeScaling
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import Deployment
from llms.verify.gates.phase0 import gate as phase0
from llms.verify.gates.phase0.config import compare, stated_fields, to_v4, to_v5
from llms.verify.gates.phase0.weights import weight_ledger
from llms.verify.reference.hf_facts import expected_tensors

LLMS = Path(__file__).resolve().parents[2] / "llms"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny Llama checkpoint: llama3 scaling, tied head."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(LLMS / "llama32_1b" / "tiny", copy)
    return copy


def opened(folder: Path, model: str = "llama32_1b") -> Deployment:
    driver.select("twin")
    return Deployment.from_folder(model, checkpoint=folder)


def check(name: str, deployment: Deployment) -> Any:
    return phase0.run(name, deployment, deployment.hf_reference())


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the tensors of the single weight file."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def set_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, **fields}))


def shard(folder: Path) -> None:
    """Split the weights into two shards with an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "model.safetensors").unlink()


def ledger(folder: Path) -> list[str]:
    return weight_ledger(folder, expected_tensors(folder), None)[0]


@pytest.mark.parametrize("name", phase0.CHECKS)
def test_a_right_checkpoint_passes(folder: Path, name: str) -> None:
    outcome = check(name, opened(folder))
    assert outcome.ok, outcome.message
    json.dumps(outcome.payload)


def test_the_ledger_counts_what_was_loaded_and_assigned(folder: Path) -> None:
    payload = check("weights", opened(folder)).payload
    assert payload["expected"] == payload["loaded"] == payload["assigned"] == payload["in_files"] == 29
    assert payload["unused"] == []
    assert payload["index"] is False
    shard(folder)
    payload = check("weights", opened(folder)).payload
    assert payload["status"] == "OK"
    assert payload["index"] is True
    assert [item["tensors"] for item in payload["shards"]] == [15, 14]


def test_renamed_tensor(folder: Path) -> None:
    old, new = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.upper.weight"
    rewrite(folder, lambda tensors: tensors.update({new: tensors.pop(old)}))
    outcome = check("weights", opened(folder))
    assert not outcome.ok
    assert f"tensor {old} [512, 256] is missing" in outcome.message
    assert f"tensor {new} belongs to no part of the model" in outcome.message


def test_extra_tensor(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(folder, lambda t: t.update({name: t["model.norm.weight"].clone()}))
    outcome = check("weights", opened(folder))
    assert not outcome.ok
    assert f"tensor {name} belongs to no part of the model" in outcome.message
    assert f"tensor {name} in the files and unused by the deployment" in outcome.message


def test_wrong_shape(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(folder, lambda t: t.update({name: t[name][:64].clone()}))
    assert any(f"{name} is [64, 256], the model has [128, 256]" in text for text in ledger(folder))


def test_missing_and_stray_shard_and_a_moved_tensor(folder: Path, tmp_path: Path) -> None:
    shard(folder)
    assert ledger(folder) == []
    index = folder / "model.safetensors.index.json"
    right = index.read_text()
    table = json.loads(right)
    name = min(table["weight_map"])
    table["weight_map"][name] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(table))
    assert any(f"tensor {name} is in model-00001-of-00002.safetensors" in text for text in ledger(folder))
    index.write_text(right)
    stray = folder / "extra.safetensors"
    shutil.copy(LLMS / "qwen3_0_6b" / "tiny" / "model.safetensors", stray)
    assert any("extra.safetensors is not named by" in text for text in ledger(folder))
    stray.unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert any("model-00002-of-00002.safetensors is missing: 14 tensors" in text for text in ledger(folder))


def test_a_head_that_repeats_the_embedding_is_redundant_another_one_contradicts(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    outcome = check("weights", opened(folder))
    assert outcome.ok, outcome.message
    assert outcome.payload["redundant"] == ["lm_head.weight"]
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].flip(0).contiguous()}))
    outcome = check("weights", opened(folder))
    assert "says the head is tied, the file holds a lm_head.weight of its own" in outcome.message


def test_untied_flag_without_a_head(folder: Path) -> None:
    set_config(folder, tie_word_embeddings=False)
    outcome = check("weights", opened(folder))
    assert not outcome.ok
    assert "tensor lm_head.weight [2048, 256] is missing" in outcome.message
    assert "the deployment cannot load its weights" in outcome.message


def test_tensors_assigned_to_the_wrong_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = {**weights._LAYER, "w_gate": weights._LAYER["w_up"], "w_up": weights._LAYER["w_gate"]}
    monkeypatch.setattr(weights, "_LAYER", swapped)
    outcome = check("weights", opened(folder))
    assert (
        "weight layers.0.w_gate does not hold tensor model.layers.0.mlp.gate_proj.weight" in outcome.message
    )
    assert outcome.payload["assigned"] == 29 - 2 * 3


def test_a_tensor_that_is_never_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = weights.load_weights

    def load(tensors: Any, config: Any) -> Any:
        found = right(tensors, config)
        tensors._loaded.discard("model.layers.2.input_layernorm.weight")
        return found

    monkeypatch.setattr("llms.llama_kernel_builder.deployment.session.load_weights", load)
    outcome = check("weights", opened(folder))
    assert "tensor model.layers.2.input_layernorm.weight never loaded by the deployment" in outcome.message


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rope_theta": 10000.0}, "rope_theta"),
        ({"rope_scaling": RopeScaling()}, "rope_scaling"),
        ({"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 64)}, "rope_scaling"),
        ({"rms_eps": 1e-6}, "rms_eps"),
        ({"tied_embeddings": False}, "tied_embeddings"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"qk_norm": True}, "qk_norm"),
        ({"head_dim": 32}, "head_dim"),
        ({"n_kv_heads": 4}, "n_kv_heads"),
        ({"eos_token_ids": (1,)}, "eos_token_ids"),
        ({"max_position": 4096}, "max_position"),
    ],
)
def test_a_field_that_differs_from_config_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], field: str
) -> None:
    deployment = opened(folder)
    right = deployment.config()
    assert compare(stated_fields(folder), right)[0] == []
    monkeypatch.setattr(deployment.adapter, "build_config", lambda name: replace(right, **change))
    found = check("config", opened(folder))
    assert not found.ok
    assert f"\n  {field} is " in found.message, found.message
    assert found.payload["forms"] == {"v4": False, "v5": False}


@pytest.mark.parametrize("known", ["v4", "v5"])
def test_a_reader_that_knows_one_form_only(folder: Path, monkeypatch: pytest.MonkeyPatch, known: str) -> None:
    """The classic: `getattr(config, "rope_theta", 10000)` on a file that has rope_parameters, and back."""

    def build(name: str) -> ModelConfig:
        data = json.loads((Path(name) / "config.json").read_text())
        config = ModelConfig.from_hf_folder(Path(name))
        theta = data.get("rope_theta") if known == "v4" else data.get("rope_parameters", {}).get("rope_theta")
        return replace(config, rope_theta=float(theta or 10000.0))

    deployment = opened(folder)
    monkeypatch.setattr(deployment.adapter, "build_config", build)
    found = check("config", deployment)
    assert found.payload["forms"] == {"v4": known == "v4", "v5": known == "v5"}
    assert not found.ok


def test_both_forms_say_the_same(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    assert "rope_theta" not in to_v5(to_v4(raw))
    assert to_v5(to_v4(raw)) == to_v5(raw)
    old = to_v4(raw)
    assert old["rope_theta"] == 500000.0
    assert old["rope_scaling"]["rope_type"] == "llama3"
    assert old["torch_dtype"] == "bfloat16"
    assert "dtype" not in old


def test_a_field_that_nobody_states_is_a_problem(folder: Path) -> None:
    problems, _ = compare({"n_layers": 3}, ModelConfig.from_hf_folder(folder))
    assert any(
        "field head_dim = 64 of the built configuration is held against nothing" in p for p in problems
    )


@pytest.mark.parametrize("fault", ["theta", "scaling", "interleaved", "off by one"])
def test_rotary_angles_that_are_not_the_models(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    right = rope_table.rope_table

    def table(config: ModelConfig, length: int) -> Any:
        if fault == "theta":
            return right(replace(config, rope_theta=config.rope_theta * 1.01), length)
        if fault == "scaling":
            return right(replace(config, rope_scaling=RopeScaling()), length)
        found = right(config, length)
        if fault == "off by one":
            return np.roll(found, 1, axis=0)
        return np.ascontiguousarray(found.reshape(length, 2, -1).swapaxes(1, 2)).reshape(length, -1)

    monkeypatch.setattr("llms.llama_kernel_builder.deployment.session.rope_table", table)
    outcome = check("rope", opened(folder))
    assert not outcome.ok
    assert "transformers has" in outcome.message
    assert outcome.payload["worst_of_limit"] > 1


def test_double_begin_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = opened(folder)
    right = Deployment.encode

    def encode(self: Deployment, text: str, style: Any = None) -> EncodedPrompt:
        prompt = right(self, text, style)
        return replace(prompt, ids=(self.tokenizer.bos_token_id, *prompt.ids))

    assert right(deployment, "Hello").ids[0] == deployment.tokenizer.bos_token_id
    monkeypatch.setattr(Deployment, "encode", encode)
    outcome = check("tokens", deployment)
    assert not outcome.ok
    assert "stands twice" in outcome.message


def test_template_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = opened(folder)

    def encode(self: Deployment, text: str, style: Any = None) -> EncodedPrompt:
        return EncodedPrompt(text, tuple(self.tokenizer(text)["input_ids"]), "instruct")

    monkeypatch.setattr(Deployment, "encode", encode)
    outcome = check("tokens", deployment)
    assert "the checkpoint's tokenizer gives" in outcome.message


def test_another_models_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    deployment = opened(folder)
    deployment.tokenizer = AutoTokenizer.from_pretrained(LLMS / "qwen2" / "tiny")
    outcome = check("tokens", deployment)
    assert not outcome.ok
    assert "the deployment uses a tokenizer of 2500 tokens, the checkpoint's own has 2048" in outcome.message
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLMS / "qwen2" / "tiny" / name, folder / name)
    outcome = check("tokens", opened(folder))
    assert "the tokenizer has 2500 tokens, the embedding 2048 rows: another model's" in outcome.message


def test_a_reference_that_says_nothing() -> None:
    rng = np.random.default_rng(0)
    flat = phase0.text_statistics(rng.standard_normal((8, 512)) * 1e-3, range(8))
    assert "undecided" in phase0.degeneracy(flat)[0][0]
    peaked = np.zeros((8, 512))
    peaked[:, 3] = 20
    stuck = phase0.text_statistics(peaked, [3] * 8)
    assert phase0.degeneracy(stuck) == ([], ["all 8 tokens are the same one: the reference repeats itself"])
    tied = np.zeros((8, 512))
    tied[:, :2] = 9
    assert "equal at every step" in phase0.degeneracy(phase0.text_statistics(tied, range(8)))[0][0]


@pytest.mark.parametrize("fault", ["nan", "f32", "deaf"])
def test_a_reference_that_is_none(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = opened(folder)
    reference = deployment.hf_reference(dtype="float32" if fault == "f32" else "bfloat16")
    right = type(reference).run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        found = right(self, *args, **options)
        if fault == "nan":
            keys = np.array(found.keys)
            keys[0, 0, 0, 0] = np.nan
            return replace(found, keys=keys)
        return replace(found, logits=np.ones_like(found.logits)) if fault == "deaf" else found

    monkeypatch.setattr(type(reference), "run", run)
    outcome = phase0.run("reference", deployment, reference, 8)
    said = {"nan": "keys: not finite", "f32": "runs in float32", "deaf": "does not read it"}
    assert said[fault] in outcome.message
