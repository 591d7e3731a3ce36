"""The order of the tests changes no verdict, with two workers, on real models with tiny checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("llama32_1b", "qwen2", "qwen3_0_6b")
SEEDS = (1, 2, 3)

pytestmark = pytest.mark.slow


def verdicts(folder: Path, seed: int) -> dict[str, dict[str, str]]:
    """Outcome of every test by model, and the verdict of each phase, of one run with two workers."""
    pytest.importorskip("pytest_randomly")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--randomly-seed={seed}"]
    command += ["-m", "not slow and not phase7", f"--npu-report-dir={folder}", "--npu-run-id=run"]
    command += [str(ROOT / "llms" / model) for model in MODELS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1500)
    found = {}
    for model in MODELS:
        results = json.loads((folder / model / "run" / "results.json").read_text())
        tests = {test["nodeid"]: test["outcome"] for test in results["tests"]}
        phases = {f"phase {phase['phase']}": phase["verdict"] for phase in results["phases"]}
        assert len({test["worker"] for test in results["tests"]}) == 1, "one model, one worker"
        found[model] = {**tests, **phases, "verdict": results["verdict"]}
    assert done.returncode == 0, done.stdout[-3000:]
    return found


def test_three_shuffled_parallel_runs_give_the_same_verdicts(tmp_path):
    first, *others = [verdicts(tmp_path / str(seed), seed) for seed in SEEDS]
    assert {model: outcomes["verdict"] for model, outcomes in first.items()} == dict.fromkeys(MODELS, "PASS")
    assert all(len(outcomes) > 40 for outcomes in first.values())
    for other in others:
        assert other == first
