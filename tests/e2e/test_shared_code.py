"""A change of shared code ends the verdicts of every model, and `npu-deploy run --all` judges them again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest_npu.ledger import store as ledger
from typer.testing import CliRunner

from llms.verify.contract.models import ModelFolder, read_folder
from npu_deploy import folders
from npu_deploy.cli import app
from npu_deploy.errors import DeployError
from npu_deploy.new import new_model
from npu_deploy.run import RunRequest, run_all, run_model

LLMS = Path(__file__).resolve().parents[2] / "llms"
NAMES = ("first_of_two", "second_of_two")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ModelFolder]:
    """Two models, and a copy of the shared code that their hashes are taken from."""
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NPU_KERNEL_REGISTRY", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = []
    for name, family in zip(NAMES, ("smollm2_135m", "qwen2"), strict=True):
        new_model(str(LLMS / family / "tiny"), name=name, into=tmp_path / "models")
        made.append(read_folder(tmp_path / "models" / name))
    shared = tmp_path / "llms"
    for part in ("llama_kernel_builder", "verify"):
        shutil.copytree(LLMS / part, shared / part, ignore=shutil.ignore_patterns("__pycache__"))
    for path in LLMS.glob("*.py"):
        shutil.copy2(path, shared / path.name)
    monkeypatch.setattr(ledger, "ROOT", shared)
    # the plugin of the runs, in processes of their own, takes its hashes from the same copy
    conftest = "from pathlib import Path\nfrom pytest_npu.ledger import store\n"
    (tmp_path / "models" / "conftest.py").write_text(f"{conftest}store.ROOT = Path({str(shared)!r})\n")
    monkeypatch.setattr(folders, "all_models", lambda: made)
    return made


PHASE_6 = RunRequest(first=6, last=6, force=True)


def run_every() -> tuple[int, list[str]]:
    """`npu-deploy run --all --from 6 --to 6 --force`."""
    outcome = run_all(PHASE_6)
    return outcome.exit_code, [row["verdict"] for row in outcome.data["models"]]


def states() -> dict[str, Any]:
    found = json.loads(CliRunner().invoke(app, ["status", "--json"]).output)
    rows = {row["model"]: row["phases"][6] for row in found["models"]}
    return {name: (row["verdict"], row["state"], row.get("changed", [])) for name, row in rows.items()}


@pytest.mark.slow
def test_phase_6_of_every_model_runs_again(models: list[ModelFolder], tmp_path: Path) -> None:
    assert run_every() == (0, ["PASS", "PASS"])
    # only phase 6 ran: it holds, but the phases before it have no verdict
    assert states() == dict.fromkeys(NAMES, ("PASS", "out of order", []))

    path = tmp_path / "llms" / "llama_kernel_builder" / "host_ops.py"
    path.write_text(path.read_text() + "# changed\n")
    assert states() == dict.fromkeys(NAMES, ("PASS", "stale", ["toolkit"]))
    with pytest.raises(DeployError, match="comes after a PASS of phase 0, which has not run"):
        run_model(str(models[1].folder), replace(PHASE_6, force=False))

    assert run_every() == (0, ["PASS", "PASS"])
    assert states() == dict.fromkeys(NAMES, ("PASS", "out of order", []))
    for model in models:
        first, second = ledger.read(ledger.path_of(model))
        assert first.phase == second.phase == 6
        assert first.hash != second.hash


@pytest.mark.slow
def test_one_model_that_fails_decides_the_exit_code_and_the_others_still_run(
    models: list[ModelFolder],
) -> None:
    decode = models[0].folder / f"{NAMES[0]}_decode.py"
    decode.write_text(
        decode.read_text().replace("return run.ffn(run.attention(q, k, v), residual=x)", "return x")
    )
    assert run_every() == (1, ["FAIL", "PASS"])
