"""Bisect of a model whose widths and heads are padded on the device: no false alarm, and faults are named."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from llms.llama_kernel_builder import driver
from llms.verify import localise
from llms.verify.contract.deployment import Deployment
from npu_deploy.new import new_model
from npu_twin import faults
from tools.odd_models import make_checkpoint

# Heads of 50 become 64: they are attended on the host, whose output has no padding inside the heads.
FIELDS = {
    "vocab_size": 1003,
    "hidden_size": 200,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, dict[str, str]]]:
    """The deployment, and the environment in which it was made: its cache, its registry rows."""
    folder = tmp_path_factory.mktemp("padded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_NPU_CACHE", str(folder / "cache"))
        patch.setenv("NPU_KERNEL_REGISTRY", "")
        driver.select("twin")
        make_checkpoint(folder / "checkpoint", "qwen2", FIELDS, tokenizer=None, seed=3)
        made = new_model(str(folder / "checkpoint"), name="padded_widths", into=folder / "models")
        opened = Deployment.from_folder(made.data["folder"])
        environment = {name: os.environ[name] for name in ("PYTEST_NPU_CACHE", "NPU_KERNEL_REGISTRY")}
    yield opened, environment
    opened.release_runners()


@pytest.fixture
def deployment(padded: tuple[Deployment, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Deployment:
    opened, environment = padded
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    opened.release_runners()
    return opened


def test_no_offender_in_a_clean_model(deployment: Deployment) -> None:
    report = localise.find(deployment, steps=2)
    assert report.offender is None, report.text()
    assert {"prefill_attention_cpu", "decode_attention_cpu"} <= {row.kernel for row in report.rows}


@pytest.mark.parametrize(
    ("fault", "kernel", "path"),
    [("gate_up_swapped", "gate_gemm", "prefill"), ("attention_hole", "decode_attention_cpu", "decode")],
)
def test_a_fault_is_named(deployment: Deployment, fault: str, kernel: str, path: str) -> None:
    with faults.find(fault).plant():
        report = localise.find(deployment, steps=2)
    assert report.offender is not None, report.text()
    assert (report.offender.kernel.split(".")[-1], report.offender.path) == (kernel, path)
