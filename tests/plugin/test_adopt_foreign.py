"""`--npu-adopt` on deployments that are unlike ours and do much at import (silicon/foreign_examples)."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from adoption import JUDGED, adopt, random_llama

FOREIGN = Path(__file__).parents[1] / "silicon" / "foreign_examples"
FEW = ("--npu-prompts", "1", "--npu-n-tokens", "6", "--no-phase-order")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A copy of the examples, which are not ours to write to."""
    return Path(shutil.copytree(FOREIGN, tmp_path / "foreign", ignore=shutil.ignore_patterns("__pycache__")))


def work(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


def content(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def left_behind(place: Path) -> list[str]:
    """Processes of runs in this folder that are still there."""
    mark = f"XDG_CACHE_HOME={place / 'cache'}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_scripts_around_sys_path(foreign: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Clashing module names, relative sys.path, import-time work, leaks, lists and bf16 arrays: all gates."""
    before = content(foreign)
    run = adopt(
        work(tmp_path),
        foreign / "scripts" / "models" / "alpha",
        checkpoint,
        *FEW,
        ALPHA_WEIGHTS=str(checkpoint),
    )
    run.assert_judged("alpha")
    assert "leaves threads running that its process waits for (poller)" in run.text
    assert "leaves 1 processes behind, which keep the device; they were ended" in run.text
    assert left_behind(tmp_path / "work") == []
    assert content(foreign) == before


@pytest.mark.slow
def test_a_package_that_forks(foreign: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Relative imports, tensors, keyword arguments, a reference of its own, a second process at import."""
    before = content(foreign)
    run = adopt(work(tmp_path), foreign / "packaged" / "beta", checkpoint, *FEW, BETA_WEIGHTS=str(checkpoint))
    outcomes, blind = run.outcomes("beta"), {"test_block", "test_diagnosis_cosine"}
    assert {name for name, outcome in outcomes.items() if outcome == "passed"} == JUDGED - blind, run.text
    reasons = {run.tests("beta")[name]["reason"] for name in blind}
    assert reasons == {"not offered: own reference model: no per-layer comparison"}
    assert content(foreign) == before


def test_a_missing_variable_is_named(foreign: Path, checkpoint: Path, tmp_path: Path) -> None:
    run = adopt(work(tmp_path), foreign / "scripts" / "models" / "alpha", checkpoint, "-m", "phase0")
    assert run.code == 1
    assert "import: KeyError: 'ALPHA_WEIGHTS' (started in " in run.text


MINIMAL = """
import json, os, sys, time
import numpy as np
{top}
W = os.environ["EXAMPLE_CHECKPOINT"]
C = json.load(open(W + "/config.json"))
MODEL_CHOICES = {{"base": W}}
def resolve_model(choice): return MODEL_CHOICES.get(choice, choice)
class Config: n_layers, emb_dim = C["num_hidden_layers"], C["hidden_size"]
Config.n_kv_heads, Config.head_dim = C["num_key_value_heads"], C["head_dim"]
def build_config(): return Config
class Record:
    def __init__(self, **fields): self.__dict__.update(fields)
class Runner:
    name = "minimal"
    def prefill(self, tokens):
        {prefill}
        row = np.random.default_rng(len(tokens)).normal(size=C["vocab_size"]).astype(np.float32)
        empty = {{"layer_intermediates": [], "final_hidden_normed": []}}
        return Record(**empty, logits_at_pred=row, top1_token=row.argmax())
    def decode_step(self, token, at):
        {decode}
        row = np.random.default_rng(at).normal(size=C["vocab_size"]).astype(np.float32)
        return Record(lm_head_logits=row, top1_token=row.argmax())
def build_runner(name, config, max_seq, tokenizer, **options):
    {build}
    return Runner()
"""

SLEEP = ["sleep", "3601"]
WANTS_ARGUMENT = (
    "import argparse; p = argparse.ArgumentParser(); p.add_argument('--x', required=True); p.parse_args()"
)
# What is done, where, and the words of the failure. Every one ends within the limit and says its stage.
HABITS = {
    "SystemExit at import": (
        {"top": "print('usage: no'); sys.exit(3)"},
        "import: SystemExit: 3",
        "usage: no",
    ),
    "arguments wanted at import": (
        {"top": WANTS_ARGUMENT},
        "import: SystemExit: 2",
        "the following arguments are required: --x",
    ),
    "SystemExit in build_runner": (
        {"build": "sys.exit('no device')"},
        "build_runner: SystemExit: no device",
        "",
    ),
    "KeyboardInterrupt in prefill": (
        {"prefill": "raise KeyboardInterrupt"},
        r"prefill of \d+ tokens: KeyboardInterrupt",
        "",
    ),
    "dies of a signal": (
        {"prefill": "os.kill(os.getpid(), 11)"},
        r"process of the adapter died \(signal SIGSEGV\)",
        "",
    ),
    "ends without a word": ({"decode": "os._exit(0)"}, r"process of the adapter died \(exit code 0\)", ""),
    "hangs with a child that has left the group": (
        {"top": f"import subprocess; subprocess.Popen({SLEEP}, start_new_session=True); time.sleep(99)"},
        "did not answer within 8 s",
        "",
    ),
    "never ends at exit": (
        {"top": "import atexit; atexit.register(time.sleep, 3602)"},
        "kl_max .* limit",
        "",
    ),
    "texts for logits": (
        {"decode": "return Record(lm_head_logits='none', top1_token=1)"},
        "ValueError: could not convert",
        "",
    ),
    "two tokens at once": (
        {"decode": "return Record(lm_head_logits=np.zeros(9), top1_token=[1, 2])"},
        "cannot reshape array of size 2",
        "",
    ),
    "a record that is none": (
        {"prefill": "return None"},
        "the prefill record has no layer_intermediates",
        "",
    ),
    "a record that is a dict": (
        {"prefill": "return {'top1_token': 1}"},
        "the prefill record has no layer_intermediates",
        "",
    ),
    "an open standard input": ({"top": "input('which device? ')"}, "import: EOFError", "which device?"),
}


@pytest.mark.slow
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_ends_in_a_verdict(habit: str, checkpoint: Path, tmp_path: Path) -> None:
    """One failed gate with the stage in it; nothing hangs, nothing stays behind."""
    parts, said, printed = HABITS[habit]
    target = tmp_path / "model"
    target.mkdir()
    filled = {"top": "", "prefill": "pass", "decode": "pass", "build": "pass", **parts}
    (target / "verify_adapter.py").write_text(MINIMAL.format(**filled))
    limit = "8" if "hangs" in habit else "120"
    run = adopt(work(tmp_path), target, checkpoint, "-k", "consistency", "--npu-hang-timeout", limit, *FEW)
    assert run.code == 1, run.text
    assert re.search(said, run.text), run.text
    assert printed in run.text
    outcomes = run.outcomes("model")
    assert set(outcomes) == {"test_ladder[self_consistency]"}
    assert set(outcomes.values()) <= {"failed", "error"}
    assert left_behind(tmp_path / "work") == []
