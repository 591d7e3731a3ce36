"""What `npu-deploy new` refuses: one clear sentence, its exit code, and no half-made folder."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from npu_deploy import errors
from npu_deploy.cli import app

TINY = Path(__file__).resolve().parents[2] / "llms"
Spoil = Callable[[Path], None]


def config(**fields: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        data = {**json.loads(path.read_text()), **fields}
        path.write_text(json.dumps({key: value for key, value in data.items() if value != "absent"}))

    return spoil


def tensors(change: Callable[[dict[str, Any]], None]) -> Spoil:
    def spoil(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return spoil


def sharded(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def missing_shard(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def stray_shard(folder: Path) -> None:
    sharded(folder)
    shutil.copyfile(folder / "model-00001-of-00002.safetensors", folder / "model-00003-of-00003.safetensors")


def drop(ending: str) -> Spoil:
    def change(weights: dict[str, Any]) -> None:
        name = next(name for name in sorted(weights) if name.endswith(ending))
        del weights[name]

    return tensors(change)


def other_head(weights: dict[str, Any]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + ml_dtypes.bfloat16(1)


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def cut_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


SCOPE, BAD = errors.OUT_OF_SCOPE, errors.BAD_CHECKPOINT
CASES: dict[str, tuple[str, Spoil, int, str]] = {
    "mixtral": (
        "llama32_1b",
        config(model_type="mixtral", num_local_experts=8),
        SCOPE,
        "MoE is out of scope",
    ),
    "qwen2-moe": ("qwen2", config(model_type="qwen2_moe", num_experts=60), SCOPE, "MoE is out of scope"),
    "sliding-window": (
        "qwen2",
        config(sliding_window=4096, use_sliding_window=True),
        SCOPE,
        "active sliding window of 4096 tokens",
    ),
    "mistral-with-window": (
        "llama32_1b",
        config(model_type="mistral", sliding_window=4096),
        SCOPE,
        "active sliding window of 4096 tokens",
    ),
    "layers-with-window": (
        "qwen3_0_6b",
        config(layer_types=["full_attention", "sliding_attention"]),
        SCOPE,
        "only full attention is in scope",
    ),
    "deepseek": (
        "llama32_1b",
        config(model_type="deepseek_v3", kv_lora_rank=512, n_routed_experts=256),
        SCOPE,
        "multi-head latent attention",
    ),
    "t5": ("llama32_1b", config(model_type="t5", is_encoder_decoder=True), SCOPE, "encoder-decoder"),
    "phi3": ("llama32_1b", config(model_type="phi3"), SCOPE, "fused in one matrix"),
    "gpt2": ("llama32_1b", config(model_type="gpt2"), SCOPE, "model_type 'gpt2' is out of scope"),
    "yarn": (
        "llama32_1b",
        config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        SCOPE,
        "rope type 'yarn'",
    ),
    "dynamic": (
        "llama32_1b",
        config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        SCOPE,
        "rope type 'dynamic'",
    ),
    "half-rotary": ("llama32_1b", config(partial_rotary_factor=0.5), SCOPE, "partial_rotary_factor 0.5"),
    "mlp-bias": ("llama32_1b", config(mlp_bias=True), SCOPE, "mlp_bias is set"),
    "gelu": ("llama32_1b", config(hidden_act="gelu"), SCOPE, "SwiGLU needs silu"),
    "quantised": (
        "llama32_1b",
        config(quantization_config={"quant_method": "gptq"}),
        SCOPE,
        "weights are quantised (gptq)",
    ),
    "tied-but-own-head": ("llama32_1b", tensors(other_head), BAD, "the tied flag contradicts the file"),
    "untied-without-head": (
        "llama32_1b",
        config(tie_word_embeddings=False),
        BAD,
        "the tied flag contradicts the file",
    ),
    "missing-shard": ("llama32_1b", missing_shard, BAD, "shard model-00002-of-00002.safetensors is missing"),
    "stray-shard": ("llama32_1b", stray_shard, BAD, "model-00003-of-00003.safetensors"),
    "missing-bias": ("qwen2", drop("k_proj.bias"), BAD, "bias 'model.layers.0.self_attn.k_proj.bias'"),
    "unexpected-bias": ("qwen2", config(model_type="mistral"), BAD, "has no place for it"),
    "wrong-head-dim": ("llama32_1b", config(head_dim=32), BAD, "head_dim is wrong"),
    "missing-tensor": ("smollm2_135m", drop("mlp.up_proj.weight"), BAD, "is missing from the weights"),
    "missing-field": ("llama32_1b", config(rms_norm_eps="absent"), BAD, "field 'rms_norm_eps' is missing"),
    "no-tokenizer": ("llama32_1b", no_tokenizer, BAD, "tokenizer"),
    "small-vocabulary": ("llama32_1b", config(vocab_size=100), BAD, "config.json makes it 100 x 256"),
    "no-room-to-generate": (
        "smollm2_135m",
        config(max_position_embeddings=33),
        errors.PRECONDITION,
        "takes at least 34 positions",
    ),
    "cut-file": ("llama32_1b", cut_file, BAD, "truncated"),
}


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("case", CASES)
def test_rejected_with_one_sentence_and_no_folder(case: str, tmp_path: Path) -> None:
    family, spoil, code, sentence = CASES[case]
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(TINY / family / "tiny", checkpoint)
    spoil(checkpoint)
    into = tmp_path / "models"
    got, text = invoke("new", str(checkpoint), "--name", "refused", "--into", str(into))
    assert sentence in text
    assert got == code
    assert len(text.strip().splitlines()) == 1
    assert not into.exists() or not list(into.iterdir())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--target", "npu1"), "another array"),
        (("--dtype", "fp16"), "fp16 has no matrix unit"),
        (("--target", "cuda"), "not known; offered: npu2"),
        (("--name", "class"), "no module name"),
    ],
)
def test_options_that_are_refused(options: tuple[str, str], sentence: str, tmp_path: Path) -> None:
    code, text = invoke("new", str(TINY / "qwen2" / "tiny"), "--into", str(tmp_path / "m"), *options)
    assert (code, sentence in text) == (errors.USAGE, True)
    assert not (tmp_path / "m").exists()


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("keep")
    code, text = invoke("new", str(TINY / "qwen2" / "tiny"), "--into", str(tmp_path), "--name", "taken")
    assert (code, "exists" in text) == (errors.PRECONDITION, True)
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["mine.txt"]


def test_nothing_of_that_name(tmp_path: Path) -> None:
    code, text = invoke("new", "nobody/no-such-model", "--into", str(tmp_path / "m"))
    assert code == errors.BAD_CHECKPOINT
    assert "no checkpoint for nobody/no-such-model" in text


def test_a_failure_while_the_folder_is_staged_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from npu_deploy import scaffold

    def broken(*_arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(scaffold, "_record", broken)
    with pytest.raises(OSError, match="disk full"):
        CliRunner().invoke(
            app,
            ["new", str(TINY / "qwen2" / "tiny"), "--into", str(tmp_path / "m"), "--name", "x"],
            catch_exceptions=False,
        )
    assert list((tmp_path / "m").iterdir()) == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_command_that_is_ended_leaves_no_folder_for_the_next(name: str, tmp_path: Path) -> None:
    """SIGKILL leaves a hidden stage, which the next `new` into that folder removes."""
    into, checkpoint = tmp_path / "m", TINY / "qwen2" / "tiny"
    command = [sys.executable, "-m", "npu_deploy", "new", str(checkpoint), "--into", str(into)]
    ended = subprocess.Popen(
        [*command, "--name", "one"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # shells may turn it off
    )
    while ended.poll() is None and not (into.is_dir() and list(into.glob(".one.*.part"))):
        time.sleep(0.01)
    ended.send_signal(getattr(signal, name))
    _, text = ended.communicate(timeout=60)
    left = sorted(path.name for path in into.iterdir())
    if name == "SIGKILL":
        assert ended.returncode == -signal.SIGKILL
        assert [path.startswith(".one.") for path in left] == [True]
        assert invoke("new", str(checkpoint), "--into", str(into), "--name", "two")[0] == 0
        assert [path.name for path in into.iterdir()] == ["two"]
    else:
        assert (ended.returncode, text) == (errors.INTERRUPTED, "interrupted\n")
        assert left == []


def test_exit_code_of_an_interrupt_inside_exec_of_a_string(tmp_path: Path) -> None:
    """`python -m` would end by SIGINT, as nobody handled the interrupt inside exec()."""
    (tmp_path / "ended.py").write_text(
        "import typer\n"
        "from npu_deploy.cli import _guarded\n"
        "typer.run(lambda: _guarded(lambda: exec('raise KeyboardInterrupt')))\n"
    )
    done = subprocess.run([sys.executable, "-m", "ended"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (errors.INTERRUPTED, "interrupted\n")
