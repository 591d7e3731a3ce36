"""A folder that `npu-deploy new --into` made runs the gates of today, and a test that was added to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from npu_deploy.cli import app
from npu_deploy.scaffold import TEMPLATES

ROOT = Path(__file__).resolve().parents[2]
OWN = """

def test_own(deployment):
    assert deployment.name == "made"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint = ROOT / "llms" / "qwen2" / "tiny"
    done = CliRunner().invoke(app, ["new", str(checkpoint), "--into", str(tmp_path), "--name", "made"])
    assert done.exit_code == 0, done.output
    return tmp_path / "made"


def test_its_gates_are_imports_and_it_may_add_tests_below_them(folder: Path) -> None:
    files = {path.name: path.read_text() for path in (folder / "tests").glob("*.py")}
    assert files == {p.name.removesuffix(".j2"): p.read_text() for p in (TEMPLATES / "tests").iterdir()}
    with (folder / "tests" / "test_phase2_block.py").open("a") as file:
        file.write(OWN)
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--import-mode=importlib", "--strict-markers"]
    names = ("phase0_reference", "phase2_block", "phase4_prefill", "phase6_topk_gate", "profile_benchmark")
    done = subprocess.run(
        [*command, *(f"made/tests/test_{name}.py" for name in names)],
        cwd=folder.parent,
        env=os.environ | {"PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "11 passed" in done.stdout
