"""Verdicts of a plain pytest run in the ledger, and what makes `npu-deploy status` call them stale."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pytest_npu import LedgerError
from pytest_npu.ledger import store as ledger
from pytest_npu.ledger import verdicts
from pytest_npu.report.model import RunReport
from typer.testing import CliRunner

from llms.verify.contract.models import read_folder
from npu_deploy.cli import app
from npu_deploy.new import new_model

LLMS = Path(__file__).resolve().parents[2] / "llms"
CODE = ("llama_kernel_builder", "verify")


@dataclass
class Deployed:
    """A model folder of its own, its checkpoint, and a copy of the shared code that its hash covers."""

    folder: Path
    checkpoint: Path
    shared: Path

    def keep(self, phases: dict[int, str]) -> int:
        """What a plain run of `phases` leaves, on the weights it used."""
        report = RunReport("thing", started_at=time.time(), finished=True)
        report.device = {"label": "twin (modelled)"}
        report.deployment = {"checkpoint": {"path": str(self.checkpoint)}}
        return verdicts.keep(self.folder, phases, report, "20260101-000000")

    def states(self) -> dict[int, Any]:
        """Phase -> state, and what changed, as `npu-deploy status` says."""
        result = CliRunner().invoke(app, ["status", str(self.folder), "--json"])
        (row,) = json.loads(result.output)["models"]
        return {p["phase"]: (p["state"], p.get("changed", [])) for p in row["phases"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("deployed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_NPU_CACHE", str(root / "cache"))
        patch.setenv("NPU_KERNEL_REGISTRY", "")
        patch.setenv("HF_HUB_OFFLINE", "1")
        shutil.copytree(LLMS / "smollm2_135m" / "tiny", root / "weights")
        new_model(str(root / "weights"), name="thing_with_verdicts", into=root)
        yield root


@pytest.fixture
def deployed(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployed:
    folder, shared = made / "thing_with_verdicts", tmp_path / "llms"
    for name in CODE:
        shutil.copytree(LLMS / name, shared / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in LLMS.glob("*.py"):
        shutil.copy2(path, shared / path.name)
    monkeypatch.setattr(ledger, "ROOT", shared)
    ledger.path_of(read_folder(folder)).unlink(missing_ok=True)
    time.sleep(0.02)  # what was just copied is older than the run
    return Deployed(folder, made / "weights", shared)


def test_verdicts_of_whole_phases_hold(deployed: Deployed) -> None:
    assert deployed.keep({0: "PASS", 1: "PASS", 2: "FAIL"}) == 3
    states = deployed.states()
    assert {n: states[n][0] for n in range(4)} == {0: "holds", 1: "holds", 2: "holds", 3: "not run"}
    entries = ledger.read(ledger.path_of(read_folder(deployed.folder)))
    assert [(e.phase, e.verdict, e.device) for e in entries] == [
        (0, "PASS", "twin (modelled)"),
        (1, "PASS", "twin (modelled)"),
        (2, "FAIL", "twin (modelled)"),
    ]


def test_a_phase_on_its_own_is_out_of_order(deployed: Deployed) -> None:
    deployed.keep({6: "PASS"})
    assert deployed.states()[6][0] == "out of order"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("shared/llama_kernel_builder/host_ops.py", "toolkit"),
        ("shared/session.py", "toolkit"),
        ("shared/verify/topk.py", "gates"),
        ("folder/thing_with_verdicts_prefill.py", "adapter"),
        ("folder/tests/test_phase2_block.py", "adapter"),
    ],
)
def test_a_verdict_is_stale_after_a_change_of_code(deployed: Deployed, change: str, part: str) -> None:
    deployed.keep({0: "PASS"})
    root, _, name = change.partition("/")
    path: Path = getattr(deployed, root) / name
    before = path.read_bytes()
    path.write_bytes(before + b"# changed\n")
    try:
        assert deployed.states()[0] == ("stale", [part])
    finally:
        path.write_bytes(before)
    assert deployed.states()[0] == ("holds", [])


def test_a_verdict_is_stale_after_a_change_of_weights(deployed: Deployed) -> None:
    deployed.keep({0: "PASS"})
    path = deployed.checkpoint / "model.safetensors"
    before = path.read_bytes()
    path.write_bytes(before[:-2] + bytes([before[-2] ^ 1, before[-1]]))
    try:
        assert deployed.states()[0] == ("stale", ["weights"])
    finally:
        path.write_bytes(before)


def test_code_that_changed_during_the_run_leaves_no_verdict(deployed: Deployed) -> None:
    path = deployed.shared / "verify" / "topk.py"
    later = time.time() + 5
    os.utime(path, (later, later))
    with pytest.raises(LedgerError, match=r"gates changed during the run \(topk.py\)"):
        deployed.keep({0: "PASS"})
    assert not ledger.path_of(read_folder(deployed.folder)).exists()


def test_a_folder_without_a_contract_has_no_ledger(tmp_path: Path) -> None:
    folder = tmp_path / "stand_in"
    folder.mkdir()
    (folder / "verify_adapter.py").write_text("")
    assert verdicts.keep(folder, {0: "PASS"}, RunReport("stand_in"), "r") == 0
    assert not (tmp_path / "reports").exists()
