"""The predicted time of a deployment is that of its own loop, whatever was planted in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llms.llama_kernel_builder import driver
from llms.llama_kernel_builder.deployment.predicted import PredictedTime, predicted_apart, predicted_time
from llms.llama_kernel_builder.deployment.session import Session
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.qwen2 import qwen2_inference
from llms.qwen2.qwen2_weights import SOURCE
from npu_twin import faults

FOLDER = Path(__file__).resolve().parents[2] / "llms" / "qwen2"


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_hf_folder(FOLDER / "tiny")


def test_it_follows_layers_and_traffic(config: ModelConfig) -> None:
    """Twice the layers cost nearly twice the time; what the host looks at is read once."""
    plain = predicted_time(qwen2_inference.SEQUENCE, config, 40)
    seen = predicted_time(qwen2_inference.SEQUENCE, config, 40, recorded=True)
    # embedding in twice (x and residual), K and V out of each layer, last output, head in and out
    assert plain.prefill_transfers == 2 + 2 * config.n_layers + 1 + 1 + 1
    assert seen.prefill_transfers == plain.prefill_transfers + config.n_layers - 1
    assert seen.prefill_ms > plain.prefill_ms
    assert seen.decode_ms == pytest.approx(plain.decode_ms, rel=1e-9)
    assert plain.ttft_ms > plain.prefill_ms
    longer = predicted_time(qwen2_inference.SEQUENCE, config, 200, recorded=True)
    assert longer.prefill_ms > seen.prefill_ms
    twice = predicted_time(qwen2_inference.SEQUENCE, replace(config, n_layers=2 * config.n_layers), 40)
    assert twice.prefill_transfers == plain.prefill_transfers + 2 * config.n_layers
    assert 1.5 < twice.prefill_ms / plain.prefill_ms < 2


def test_it_is_what_a_clean_twin_takes(config: ModelConfig) -> None:
    driver.select("twin")
    tokens = 40
    session = Session(
        qwen2_inference, SOURCE.checkpoint(str(FOLDER / "tiny")), _NoTokenizer(), tokens + 2, config=config
    )
    try:
        made = session.generate(lambda: range(5, 5 + tokens), 2, stop_at_eos=False)
    finally:
        session.close()
    expected = predicted_time(qwen2_inference.SEQUENCE, config, tokens)
    assert made.ttft_s * 1e3 == pytest.approx(expected.ttft_ms, rel=0.02)
    assert made.tpot_s * 1e3 == pytest.approx(expected.decode_ms, rel=1e-6)


class _NoTokenizer:
    def decode(self, tokens: object, **options: object) -> str:
        return ""


@pytest.mark.parametrize("fault", ["slow_tile", "set_up_in_prefill", "host_work_untimed"])
def test_a_planted_delay_is_in_the_run_and_not_in_the_prediction(config: ModelConfig, fault: str) -> None:
    before = predicted_apart(FOLDER, config, 40)
    assert isinstance(before, PredictedTime)
    with faults.find(fault).plant():
        assert predicted_apart(FOLDER, config, 40) == before
        here = predicted_time(qwen2_inference.SEQUENCE, config, 40, recorded=True)
        assert here.prefill_ms + here.decode_ms > before.prefill_ms + before.decode_ms + 40


def test_a_prediction_that_fails_says_why(config: ModelConfig) -> None:
    with pytest.raises(RuntimeError, match=r"do not fit the largest compiled length"):
        predicted_apart(FOLDER, config, 100_000)
