"""`--npu` names every missing artefact before it starts: what the phases compile is what preflight lists."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pytest_npu.device.preflight import artefacts

from llms.llama_kernel_builder.bench import spec_of
from llms.llama_kernel_builder.deployment import artefact_list
from llms.verify.contract.abilities import offered
from llms.verify.contract.models import ROOT

MODEL = "llama32_1b"
FOLDER = ROOT / MODEL
TINY = FOLDER / "tiny"
RECORDER = """
import os
from llms.llama_kernel_builder.toolchains.seam import TwinToolchain

class Recorder(TwinToolchain):
    def compile(self, program, destination):
        with open(os.environ["ASKED"], "a") as file:
            file.write(f"{program.digest} {program.name}\\n")
        return super().compile(program, destination)

def make(device, model):
    return Recorder()
"""


def listed(phases: set[int], kernels: list[object] | None = None) -> dict[str, str]:
    """Digest -> name of what preflight lists for these phases on the tiny checkpoint."""
    adapter = importlib.import_module(f"llms.{MODEL}.verify_adapter")
    wanted = artefacts.request(FOLDER, phases, kernels, checkpoint=TINY)
    needed = offered(adapter, "needed_artefacts")(wanted)
    return {program.digest: program.name for program in needed.artefacts}


@pytest.mark.slow
@pytest.mark.parametrize("phase", [1, 2, 3, 4, 5, 6])
def test_what_a_phase_compiles_is_listed(phase: int, tmp_path: Path) -> None:
    """Every phase alone, from an empty cache, with a toolchain that notes what it is asked for."""
    (tmp_path / "recorder.py").write_text(RECORDER)
    asked = tmp_path / "asked"
    env = {**os.environ, "PYTEST_NPU_CACHE": str(tmp_path / "cache"), "NPU_TOOLCHAIN": "recorder:make"}
    env |= {"ASKED": str(asked), "PYTHONPATH": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        f"phase{phase} and not slow",
    ]
    command += [
        "--npu-report-dir",
        str(tmp_path / "reports"),
        "--checkpoint",
        str(TINY),
        str(FOLDER / "tests"),
    ]
    done = subprocess.run(command, env=env, cwd=ROOT.parent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = dict(line.split() for line in asked.read_text().splitlines())
    assert seen
    missing = {name for digest, name in seen.items() if digest not in listed({phase})}
    assert not missing


def test_phases_need_different_programs() -> None:
    every, leaf, production, unfused = (listed(p) for p in ({1, 3, 6}, {1}, {6}, {3}))
    assert set(every) == set(leaf) | set(unfused)
    assert set(production) < set(unfused)
    assert not set(leaf) & set(production)
    assert "rms_gemv_rope.q_gemv" in unfused.values()
    assert any(name.startswith("gemm_") for name in leaf.values())
    assert listed({0}) == {}


def test_selected_kernels_alone_are_needed() -> None:
    from llms.verify.gates.phase1 import gate as phase1

    adapter = importlib.import_module(f"llms.{MODEL}.verify_adapter")
    first, *_ = phase1.kernels(FOLDER, adapter, checkpoint=TINY)
    assert set(listed({1}, [first]).values()) == {spec_of(first.case).symbol}


def test_longer_prompts_are_measured_in_longer_programs() -> None:
    adapter = importlib.import_module(f"llms.{MODEL}.verify_adapter")
    needed = offered(adapter, "needed_artefacts")(artefacts.published_request({4}, prompt_len=200))
    assert {p.name.partition(".")[0] for p in needed.artefacts if "." in p.name} >= {"rms_gemms_rope_s256"}


def test_the_finding_names_programs_and_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_ARTEFACTS", str(tmp_path))
    adapter = importlib.import_module(f"llms.{MODEL}.verify_adapter")
    wanted = artefacts.request(FOLDER, {1, 3}, checkpoint=TINY)
    finding = artefacts.check(MODEL, adapter, wanted)
    assert finding is not None
    programs = finding.data["programs"]
    assert f"{len(programs)} of {len(programs)} for phase 1, 3 missing in {tmp_path}" in finding.value
    assert all(program["name"] in finding.value for program in programs)
    entries = {p["digest"]: {"name": p["name"], "file": "any.elf"} for p in programs if p["phases"] != [1]}
    (tmp_path / "any.elf").write_bytes(b"x")
    (tmp_path / "manifest.json").write_text(json.dumps({"toolchain": "t 1", "entries": entries}))
    finding = artefacts.check(MODEL, adapter, wanted)
    assert finding is not None
    assert "for phase 1 missing" in finding.value
    finding = artefacts.check(MODEL, adapter, artefacts.request(FOLDER, {3}, checkpoint=TINY))
    assert finding is not None
    assert finding.status == "ok"


def test_memory_is_that_of_the_checkpoint_that_runs() -> None:
    from pytest_npu.device import preflight

    wanted = artefacts.request(FOLDER, {6}, checkpoint=TINY)
    (tiny,) = [f for f in preflight.examine_model(FOLDER, wanted) if f.name == "RAM"]
    (published,) = [f for f in preflight.examine_model(FOLDER) if f.name == "RAM"]
    assert tiny.data["needed"] < published.data["needed"] / 3


def test_a_toolchain_that_builds_needs_nothing_before(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = importlib.import_module(f"llms.{MODEL}.verify_adapter")
    monkeypatch.setenv("NPU_TOOLCHAIN", "llms.llama_kernel_builder.toolchains.seam:twin_toolchain")
    finding = artefacts.check(MODEL, adapter)
    assert finding is not None
    assert (finding.status, "NPU_TOOLCHAIN" in finding.remedy) == ("bad", True)
    monkeypatch.setattr(artefact_list, "toolchain_for", lambda *arguments: object())
    assert artefacts.check(MODEL, adapter) is None
    monkeypatch.undo()
    monkeypatch.setenv("NPU_TOOLCHAIN", "no:thing")
    finding = artefacts.check(MODEL, adapter)
    assert finding is not None
    assert (finding.status, finding.remedy) == ("bad", "correct or unset $NPU_TOOLCHAIN")


def test_an_adapter_without_the_ability_needs_nothing_before() -> None:
    assert artefacts.check("foreign", ModuleType("verify_adapter")) is None
