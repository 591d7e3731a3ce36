"""A folder that `npu-deploy new` made at c7ea232 runs unchanged: its imports, its layer by names, its gates.

tests/data/scaffold_c7ea232/oldmodel is that folder for llms/qwen2/tiny, without its documents. CHECKPOINT in
it stands for the path of the checkpoint.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "tests" / "data" / "scaffold_c7ea232" / "oldmodel"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the folder, with the checkpoint's place."""
    target = shutil.copytree(MADE, tmp_path / "oldmodel")
    weights = target / "oldmodel_weights.py"
    text = weights.read_text()
    assert text.count("CHECKPOINT") == 1
    weights.write_text(text.replace("CHECKPOINT", str(ROOT / "llms" / "qwen2" / "tiny")))
    return target


def run(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def passed(folder: Path, marks: str, *paths: str) -> list[str]:
    """Phases of the gates' report that passed."""
    options = ("-n", "0", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-m", marks)
    rows = [line.split() for line in run(folder, "pytest", *options, *paths).splitlines()]
    return [row[0] for row in rows if "PASS" in row[1:4]]


def test_its_block_and_its_token_gate(folder: Path) -> None:
    tests = [f"oldmodel/tests/test_{name}.py" for name in ("phase2_block", "phase6_topk_gate")]
    assert passed(folder, "phase2 or phase6", *tests) == ["2", "6"]


@pytest.mark.slow
def test_its_gates_of_phases_0_to_3_and_6(folder: Path) -> None:
    wanted = "(phase0 or phase1 or phase2 or phase3 or phase6) and not slow"
    assert passed(folder, wanted, "oldmodel/tests") == ["0", "1", "2", "3", "6"]


def test_its_command_line(folder: Path) -> None:
    text = run(folder, "oldmodel.oldmodel_inference", "--prompt", "What is gravity?", "--n-tokens", "2")
    assert "twin (modelled)" in text
