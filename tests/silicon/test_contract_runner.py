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

from llms.verify.contract.models import ROOT, model_folders

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


CLASH = """
import sys
sys.path.insert(0, __file__.rsplit("/", 3)[0])  # the folder above llms, as scripts of such a tree do
import config, kernel_registry.registry_lookup, llms.verify, verify
import pathlib
exec(compile(pathlib.Path({runner!r}).read_text(), __file__, "exec"))
"""


def foreign_tree(tmp_path: Path) -> Path:
    """A verifier inside a package `llms` that is not ours, with neighbours whose names are ours, too."""
    root = tmp_path / "programming_examples"
    for name in ("llms", "llms/verify", "llms/shared", "llms/qwen2", "kernel_registry", "verify"):
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text("OURS = False\n")
    for name in ("config.py", "kernel_registry/registry_lookup.py", "llms/qwen2/verify_adapter.py"):
        (root / name).write_text("OURS = False\n")
    run = root / "llms" / "verify" / "run.py"
    run.write_text(CLASH.format(runner=str(RUNNER)))
    return run


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_in_a_verifier_whose_packages_have_our_names(model: str, tmp_path: Path) -> None:
    """All rules of the contract at once: names clash, build_config() takes nothing, the weights are local.

    Models without packaged weights run their tiny checkpoint, whose shapes are not those of the published
    model.
    """
    run = foreign_tree(tmp_path)
    arguments = ("--runner", f"pytest_npu.deployed.{model}", "--n-tokens", "4")
    offline = {"HF_HUB_OFFLINE": "1"}
    done = contract(tmp_path, *arguments, script=run, **offline)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 of 1 failed\n")
    done = contract(tmp_path, *arguments, "--gate-phase", "records", script=run, **offline)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "records of " in done.stdout


def test_the_published_configuration_on_the_tiny_checkpoint_is_refused_clearly() -> None:
    from llms.llama_kernel_builder.exceptions import ConfigError

    adapter = importlib.import_module("llms.qwen2.verify_adapter")
    tiny = str(ROOT / "qwen2" / "tiny")
    with pytest.raises(ConfigError, match=r"n_layers 3 instead of 24, .*Give it the model's name, or name"):
        adapter.build_runner(tiny, adapter.CONFIG, 128, None)


def test_the_configuration_is_that_of_the_path_resolved_last() -> None:
    """The contract passes `build_config` no model, so a verifier's `--model FOLDER` reaches it this way."""
    adapter = importlib.import_module("llms.qwen2.verify_adapter")
    tiny = str(ROOT / "qwen2" / "tiny")
    assert adapter.resolve_model(tiny) == tiny
    assert adapter.build_config().n_layers == 3
    adapter.resolve_model(adapter.DEFAULT_MODEL)
    assert adapter.build_config() == adapter.CONFIG


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_folder_in_a_verifier_that_imports_ours(model: str, tmp_path: Path) -> None:
    arguments = ("--runner", f"llms.{model}.verify_adapter", "--model", str(ROOT / model / "tiny"))
    done = contract(tmp_path, *arguments, "--n-tokens", "4", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 of 1 failed\n")


def test_private_packages_leave_the_process_alone() -> None:
    """Ours are found by their private names, with all their lazy imports; the others stay what they are."""
    code = (
        "import sys, types; theirs = sys.modules['llms'] = types.ModuleType('llms'); theirs.__path__ = []\n"
        "from pytest_npu.deployed import qwen2\n"
        "config = qwen2.build_config()\n"
        "assert config.n_layers > 0 and sys.modules['llms'] is theirs\n"
        "assert 'kernel_registry' not in sys.modules\n"
        "assert type(config).__module__ == '_npu_llms.llama_kernel_builder.model_config'\n"
        "import pytest_npu.deployed.nothing"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'pytest_npu.deployed.nothing'\n")


def contract(
    tmp_path: Path, *arguments: str, script: Path = RUNNER, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the verifier in an empty folder, as its own process."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# one prompt\nThe capital of France is\n")
    command = [sys.executable, str(script), "--prompts-file", str(prompts), "--max-seq", "128", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "2", **variables}
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
