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
from pytest_npu.ledger import judging, verdicts
from pytest_npu.ledger import store as ledger
from pytest_npu.report.model import RunReport
from typer.testing import CliRunner

from kernel_registry import registry_lookup
from llms.verify.contract.models import read_folder
from npu_deploy.cli import app
from npu_deploy.new import new_model

LLMS = Path(__file__).resolve().parents[2] / "llms"


@dataclass
class Deployed:
    """A model folder of its own, its checkpoint, and a copy of the packages that its hash covers."""

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
    folder, shared = made / "thing_with_verdicts", tmp_path / "shared"
    models = [path.parent.name for path in LLMS.glob("*/verify_adapter.py")]
    for name in judging.PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", *models)
        shutil.copytree(LLMS.parent / name, shared / name, ignore=ignored)
    monkeypatch.setattr(judging, "ROOT", shared)
    monkeypatch.setattr(registry_lookup, "PACKAGED", shared / "kernel_registry")
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
        ("shared/llms/llama_kernel_builder/host_ops.py", "toolkit"),
        ("shared/llms/llama_kernel_builder/deployment/session.py", "toolkit"),
        ("shared/llms/verify/contract/topk.py", "gates"),
        ("shared/llms/verify/ladder/thresholds.json", "gates"),
        ("shared/llms/verify/contract/prompt_sets/instruct.txt", "gates"),
        ("shared/llms/checkpoints/_tensors.py", "gates"),
        ("shared/llms/verify/gates/phase7/checks.py", "gates"),
        ("shared/llms/verify/gates/optimisation.py", "gates"),
        ("shared/llms/verify/reference/kernels/tolerances.py", "gates"),
        ("shared/npu_twin/data/timing_parameters.json", "twin"),
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


def test_every_judging_file_counts(deployed: Deployed) -> None:
    """Each source and data file that judges is edited in the copy: its part of the hash changes, no other."""
    before = ledger.code_digests(deployed.folder)
    silent = []
    files = judging.judging_files()
    for part, path in ((part, path) for part, paths in files.items() for path in paths):
        assert path.is_relative_to(deployed.shared)
        text = path.read_bytes()
        path.write_bytes(text + b" ")
        now = ledger.code_digests(deployed.folder)
        path.write_bytes(text)
        if [name for name in now if now[name] != before[name]] != [part]:
            silent.append(path)
    assert not silent
    assert {path.suffix for paths in files.values() for path in paths} == {".py", ".json", ".txt"}


def test_a_verdict_is_stale_after_a_change_of_a_published_figure(deployed: Deployed) -> None:
    deployed.keep({0: "PASS"})
    path = deployed.shared / "kernel_registry" / "details" / "gemm.json"
    table = json.loads(path.read_text())
    row = next(row for row in table["rows"] if row["provenance"] == "published-silicon")
    row["used_by"] = [*row.get("used_by", ()), "another_model"]
    path.write_text(json.dumps(table))
    assert deployed.states()[0] == ("holds", [])
    row["figures"]["mean_rel_L1"] = 1.0
    path.write_text(json.dumps(table))
    assert deployed.states()[0] == ("stale", ["gates"])


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
    path = deployed.shared / "llms" / "verify" / "contract" / "topk.py"
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
