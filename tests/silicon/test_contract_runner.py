"""Our adapters in a verifier that knows only the deployment contract (tools/contract_runner.py)."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llms.models import ROOT, model_folders

RUNNER = Path(__file__).parent / "tools" / "contract_runner.py"
MODELS = [model.name for model in model_folders()]


@pytest.mark.parametrize("model", MODELS)
def test_names_and_signatures(model: str) -> None:
    adapter = importlib.import_module(f"llms.{model}.verify_adapter")
    assert adapter.DEFAULT_MODEL in adapter.MODEL_CHOICES
    assert adapter.resolve_model(adapter.DEFAULT_MODEL) == adapter.MODEL_CHOICES[adapter.DEFAULT_MODEL]
    assert adapter.resolve_model("/some/folder") == "/some/folder"
    config = adapter.build_config()  # without an argument, as the contract calls it
    assert all(getattr(config, name) > 0 for name in ("n_layers", "emb_dim", "n_kv_heads", "head_dim"))
    parameters = inspect.signature(adapter.build_runner).parameters
    assert list(parameters)[:4] == ["model_name", "config", "max_seq", "tokenizer"]
    for name, default in (("npu_attn", True), ("lite_mode", False)):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is default


def contract(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the verifier in an empty folder, as its own process."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# one prompt\nThe capital of France is\n")
    command = [sys.executable, str(RUNNER), "--prompts-file", str(prompts), "--max-seq", "128", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        ("--runner", "llms.smollm2_135m.verify_adapter"),
        ("--path", str(ROOT), "--runner", "smollm2_135m.verify_adapter"),
    ],
    ids=["dotted", "by sys.path"],
)
def test_token_set_gate_in_two_processes(how: tuple[str, ...], tmp_path: Path) -> None:
    gate = tmp_path / "gate.json"
    done = contract(tmp_path, *how, "--n-tokens", "4", "--gate-file", str(gate))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 of 1 failed\n")
    handed = json.loads(gate.read_text())
    assert list(handed) == ["0"]
    assert [len(handed["0"][name]) for name in ("chosen", "topk")] == [4, 4]
    assert [row[0] for row in handed["0"]["topk"]] == handed["0"]["chosen"]


@pytest.mark.slow
def test_records(tmp_path: Path) -> None:
    done = contract(tmp_path, "--runner", "llms.smollm2_135m.verify_adapter", "--gate-phase", "records")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "records of 30 layers, heads 3 x 64" in done.stdout


@pytest.mark.slow
def test_a_wrong_hand_over_fails_the_gate(tmp_path: Path) -> None:
    """The comparison is one: tokens the reference does not have in its top 5 fail."""
    gate = tmp_path / "gate.json"
    gate.write_text(json.dumps({"0": {"chosen": [7, 7], "topk": [[7, 8, 9, 10, 11]] * 2}}))
    runner = ("--runner", "llms.smollm2_135m.verify_adapter", "--gate-phase", "compare-hf")
    done = contract(tmp_path, *runner, "--gate-file", str(gate))
    assert done.returncode == 1
    assert "FAIL: step 0, npu 7" in done.stdout
