"""Phase 1's test in a model folder: of an earlier scaffold, imported in one line, of a foreign adapter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llms.verify.contract.deployment import load_adapter
from llms.verify.gates.phase1 import gate as phase1

PROJECT = Path(__file__).resolve().parents[2]
SCAFFOLDED = """
import pytest

from llms import phase1

pytestmark = pytest.mark.phase1
pytest_generate_tests = phase1.generate_tests


def test_kernel(kernel, npu_device, npu_lock, npu_record):
    outcome = phase1.check(kernel, device=npu_lock)
    npu_record("phase1", outcome.payload)
    assert outcome.ok, outcome.message
"""
SHARED = """
import pytest

from llms.verify.gates.phase1.gate import check, pytest_generate_tests


@pytest.mark.phase1
def test_kernel(kernel, npu_device, npu_lock, npu_record):
    outcome = check(kernel, device=npu_lock)
    npu_record(outcome.kind, outcome.payload)
    assert outcome.ok, outcome.message
"""
ONE_LINE = "from shared_suite import pytest_generate_tests, test_kernel\n"
OURS = """
from llms.qwen2 import verify_adapter as ours

MODEL_CHOICES, DEFAULT_MODEL, CONFIG = ours.MODEL_CHOICES, ours.DEFAULT_MODEL, ours.CONFIG
resolve_model, build_config, build_runner = ours.resolve_model, ours.build_config, ours.build_runner
"""
FOREIGN = """
MODEL_CHOICES = {"one": "nobody/one"}


def resolve_model(choice):
    return MODEL_CHOICES.get(choice, choice)


def build_config():
    raise AssertionError("collection needs no configuration")


def build_runner(model_name, config, max_seq, tokenizer, *, npu_attn=True, lite_mode=False):
    raise AssertionError("phase 1 needs no runner")
"""


def model(root: Path, adapter: str, test: str) -> Path:
    folder = root / "models" / "some_model"
    (folder / "tests").mkdir(parents=True)
    (folder / "verify_adapter.py").write_text(adapter)
    (folder / "tests" / "test_phase1_kernels.py").write_text(test)
    (root / "shared_suite.py").write_text(SHARED)
    return folder


def run(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", "-m", "phase1", *options, "models"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("test", [SCAFFOLDED, ONE_LINE], ids=["scaffolded before", "one line"])
def test_every_kernel_is_collected_by_the_folder_of_the_test(tmp_path: Path, test: str) -> None:
    folder = model(tmp_path, OURS, test)
    done = run(tmp_path, "--collect-only")
    assert done.returncode == 0, done.stdout + done.stderr
    listed = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    expected = [kernel for kernel in phase1.kernels(folder, load_adapter(folder)) if not kernel.slow]
    assert len(expected) > 30
    assert sorted(listed) == sorted(f"test_kernel[{kernel}]" for kernel in expected)


@pytest.mark.parametrize("test", [SCAFFOLDED, ONE_LINE], ids=["scaffolded before", "one line"])
def test_a_foreign_adapter_is_not_offered_and_no_pass(tmp_path: Path, test: str) -> None:
    model(tmp_path, FOREIGN, test)
    done = run(tmp_path, "-rs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not offered: the adapter has no kernel_bench()" in done.stdout
    assert "1 skipped" in done.stdout
    assert "passed" not in done.stdout
    assert "PASS" not in done.stdout
