"""The audit notices replaced functions, constants and clocks, and code that looks at who is watching."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pytest_npu.ledger import judging

from llms.llama_kernel_builder import driver
from llms.llama_kernel_builder.deployment.watch import replaced_functions, watch
from llms.qwen2 import qwen2_inference
from llms.verify.contract import topk
from llms.verify.gates.phase7 import integrity
from llms.verify.gates.phase7.types import Setting
from llms.verify.ladder.thresholds import Thresholds
from npu_deploy.audit import planted

LLMS = Path(__file__).resolve().parents[2] / "llms"
MODELS = ("smollm2_135m", "qwen2", "qwen3_0_6b", "llama32_1b")


@pytest.fixture(scope="module")
def shipped() -> integrity.Snapshot:
    device = driver.select("twin")
    setting = Setting(device.label, device.clock, watch, planted, judging.judging_modules, judging.data_files)
    return integrity.Snapshot.take(setting, ("qwen2",))


def test_nothing_was_replaced(shipped: integrity.Snapshot) -> None:
    assert len(shipped.prints) > 3000
    assert shipped.changed() == []


def test_a_replaced_function(shipped: integrity.Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(*args: Any) -> None:
        """Passes everything."""

    monkeypatch.setattr(topk, "judge_prompt", lenient)
    assert shipped.changed() == [
        "llms.verify.contract.topk:judge_prompt (now lenient of test_audit_integrity.py)"
    ]


def test_a_replaced_method(shipped: integrity.Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thresholds, "recorded", classmethod(lambda cls, checkpoint: None))
    assert [name.split(" ")[0] for name in shipped.changed()] == [
        "llms.verify.ladder.thresholds:Thresholds.recorded"
    ]


def test_another_constant(shipped: integrity.Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "K", 50)
    assert shipped.changed() == ["llms.verify.contract.topk:K"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("llms.verify.gates.phase1.gate", "judge"),
        ("llms.verify.gates.phase1.kernel_laws", "baseline"),
        ("llms.verify.gates.optimisation", "compare_logits"),
        ("llms.verify.gates.measure", "judge"),
        ("llms.verify.gates.phase6.performance", "set_up"),
        ("llms.checkpoints", "load_tensors"),
        ("llms.verify.reference.kernels.tolerances", "tolerance"),
        ("llms.verify.reference.kernels.references", "reference_output"),
        ("kernel_registry.registry_lookup", "rows"),
    ],
)
def test_the_judges_of_every_phase(
    shipped: integrity.Snapshot, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    def lenient(*args: Any) -> None:
        """Passes everything."""

    monkeypatch.setattr(f"{module}.{name}", lenient)
    assert shipped.changed() == [f"{module}:{name} (now lenient of test_audit_integrity.py)"]


def test_another_limit_on_the_disk(
    shipped: integrity.Snapshot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in judging.PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", *MODELS)
        shutil.copytree(LLMS.parent / name, tmp_path / name, ignore=ignored)
    monkeypatch.setattr(judging, "ROOT", tmp_path)
    assert shipped.changed() == []
    path = tmp_path / "llms" / "verify" / "ladder" / "thresholds.json"
    path.write_text(path.read_text().replace('"value": 0', '"value": 9'))
    assert shipped.changed() == ["<llms/verify/ladder/thresholds.json>"]


def test_another_default(shipped: integrity.Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk.judge, "__kwdefaults__", {"k": 50, "n_tokens": 32})
    assert any(name.startswith("llms.verify.contract.topk:judge ") for name in shipped.changed())


def test_a_clock_of_ones_own(shipped: integrity.Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.current().clock, "now", lambda: 0.0)
    assert shipped.changed() == ["<device clock's attributes>"]


@pytest.mark.parametrize("model", MODELS)
def test_our_models_watch_nobody(model: str) -> None:
    assert integrity.watching_code(LLMS / model) == []


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ('import os\nMOCK = "PYTEST_XDIST_WORKER" in os.environ', "'PYTEST_XDIST_WORKER'"),
        ('import sys\nMOCK = "pytest" in sys.modules', "'pytest'"),
        ("import inspect\nMOCK = inspect.stack()[3]", "inspect.stack"),
        ("import sys\nMOCK = sys._getframe(2)", "sys._getframe"),
    ],
)
def test_code_that_watches(code: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "verify_adapter.py").write_text(code)
    (tmp_path / "fine.py").write_text('CACHE = "PYTEST_NPU_CACHE"')
    assert f"verify_adapter.py, line 2: looks at {what}" in integrity.watching_code(tmp_path)
    assert not any("fine" in line for line in integrity.watching_code(tmp_path))


def test_a_patched_production_function(monkeypatch: pytest.MonkeyPatch) -> None:
    path = LLMS / "qwen2" / "qwen2_inference.py"
    assert replaced_functions(qwen2_inference, path) == []

    def another(*args: Any) -> None:
        """Not the source's."""

    monkeypatch.setattr(qwen2_inference, "run_npu_decode_step", another)
    assert replaced_functions(qwen2_inference, path) == [
        "qwen2_inference.py: run_npu_decode_step is not the one of the source (now another of "
        "test_audit_integrity.py)"
    ]
