"""A runner in another process: when its process starts, what is held meanwhile, what crosses over."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from llms.verify.contract.abilities import offered
from llms.verify.foreign.process import RemoteError, Worker
from llms.verify.foreign.remote import AdoptedWeakness, RemoteAdapter, RemoteRunner, RemoteSettings
from llms.verify.reference.arithmetic import DeviceArithmetic
from llms.verify.reference.arithmetic.description import (
    LINEARS,
    AttentionArithmetic,
    LinearArithmetic,
    PhaseArithmetic,
)

ADAPTER = """
import subprocess
from types import SimpleNamespace
import ml_dtypes
import numpy as np

MODEL_CHOICES = {"base": "org/base", "instruct": "org/instruct"}

def resolve_model(choice):
    return MODEL_CHOICES.get(choice, choice)

def build_config():
    return SimpleNamespace(n_layers=1, emb_dim=4, n_kv_heads=1, head_dim=4, odd_field=9)

class Runner:
    name = "theirs"
    def prefill(self, tokens):
        if len(tokens) > 5:
            raise ValueError(f"{len(tokens)} tokens are too many")
        self.row = np.arange(8, dtype=np.float32)
        return SimpleNamespace(layer_intermediates=[{"ffn_out": self.row.astype(ml_dtypes.bfloat16)}],
                               final_hidden_normed=None, logits_at_pred=self.row, top1_token=7)
    def decode_step(self, token, position):
        self.row += 1
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        return SimpleNamespace(lm_head_logits=self.row, top1_token=np.int64(token))
    def prompt_limits(self):
        return (2, 5)

def build_runner(model_name, config, max_seq, tokenizer, *, npu_attn=True, lite_mode=False):
    assert (model_name, max_seq) == ("org/base", 2048)
    return Runner()
"""
TOKENIZER = SimpleNamespace(name_or_path="/nowhere")


class Held:
    """A device that remembers who takes it."""

    def __init__(self) -> None:
        self.now = False
        self.times = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.now, self.times = True, self.times + 1
        yield
        self.now = False


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def runner(tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteRunner]:
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "theirs"
    folder.mkdir()
    # Loading a tokenizer costs seconds and this runner wants none.
    blind = "\nimport sys\nsys.modules['__main__'].tokenizer_of = lambda path: None\n"
    (folder / "verify_adapter.py").write_text(textwrap.dedent(ADAPTER) + blind)
    adapter = RemoteAdapter(folder, RemoteSettings(pyxrt="npu_twin.pyxrt", limit_s=60, device=held))
    assert adapter.DEFAULT_MODEL == "base"
    assert vars(adapter.build_config()) == {"n_layers": 1, "emb_dim": 4, "n_kv_heads": 1, "head_dim": 4}
    built = adapter.build_runner("org/base", None, 64, TOKENIZER)
    yield built
    built.close()


def test_the_device_is_held_while_the_process_lives(runner: RemoteRunner, held: Held) -> None:
    assert offered(runner, "forms") is None
    assert held.times == 0, "nobody asked for anything yet"
    assert offered(runner, "kv_cache") is None
    assert held.now, "only a built runner knows its abilities"
    limits = offered(runner, "prompt_limits")
    assert limits is not None
    assert limits() == (2, 5)
    ended = runner.close()
    assert ended is not None
    assert ended.how == "exit code 0"
    assert not held.now
    with pytest.raises(RemoteError, match="has ended already"):
        runner.prefill(np.array([1]))


def test_records_are_copies_in_their_own_type(runner: RemoteRunner) -> None:
    record = runner.prefill(np.array([1, 2]))
    assert record.layer_intermediates[0]["ffn_out"].dtype == ml_dtypes.bfloat16
    assert record.final_hidden_normed.size == 0
    assert runner.decode_step(3, 2).top1_token == 3
    assert record.logits_at_pred.tolist() == list(range(8))
    with pytest.warns(AdoptedWeakness, match="leaves 1 processes behind"):
        runner.close()


def test_an_error_names_its_stage_and_the_process_goes_on(runner: RemoteRunner) -> None:
    with pytest.raises(RemoteError, match=r"prefill of 6 tokens: ValueError: 6 tokens are too many"):
        runner.prefill(np.arange(6))
    assert runner.prefill(np.arange(5)).top1_token == 7


def test_views_are_seen(runner: RemoteRunner) -> None:
    runner.prefill_watched(np.array([1, 2]))
    assert runner.changed() == ()
    runner.decode_step(3, 2)
    assert runner.changed() == ("logits_at_pred",)
    with pytest.warns(AdoptedWeakness):
        runner.close()


def test_a_device_is_free_after_a_start_that_failed(runner: RemoteRunner, held: Held) -> None:
    broken = RemoteAdapter(runner._adapter.folder, runner._adapter.settings)
    other = broken.build_runner("org/other", None, 64, TOKENIZER)
    with pytest.raises(RemoteError, match="build_runner: AssertionError"):
        other.prefill(np.array([1]))
    assert not held.now


def test_a_worker_that_nobody_closed_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path))
    worker = Worker(tmp_path, pyxrt="npu_twin.pyxrt", limit_s=60)
    process = worker._process
    del worker
    assert process.poll() is not None


def test_a_worker_that_hangs_ends_with_a_killed_run(tmp_path: Path) -> None:
    (tmp_path / "verify_adapter.py").write_text("import time\ntime.sleep(600)\n")
    program = (
        "import sys; from pathlib import Path; from llms.verify.foreign.process import Worker\n"
        f"worker = Worker(Path({str(tmp_path)!r}), pyxrt=None, limit_s=0)\n"
        "print(worker._process.pid, flush=True)\n"
        "worker.call('describe', choice=None)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    place = Path("/proc") / run.stdout.readline().strip()
    assert place.exists()
    time.sleep(1)
    run.send_signal(signal.SIGKILL)
    run.wait()
    until = time.monotonic() + 20
    while place.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not place.exists()


def test_an_arithmetic_crosses_over() -> None:
    linears = {name: LinearArithmetic("gemv", slices=(4, 8)) for name in LINEARS}
    prefill = PhaseArithmetic(linears, AttentionArithmetic("flash", 256), {"rope": "floor"}, {"qk_norm": 64})
    decode = PhaseArithmetic(linears, AttentionArithmetic("host"))
    whole = DeviceArithmetic(prefill, decode, LinearArithmetic("cascade", 512), 3)
    assert DeviceArithmetic.from_dict(whole.as_dict()) == whole
