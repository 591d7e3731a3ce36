"""Records are copies: a runner that reuses its buffers cannot change what was recorded."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from llms.verify.contract.records import (
    DecodeProbe,
    DecodeStepRecord,
    NpuRunner,
    PrefillRecord,
    ProbedRunner,
)


def test_a_pooled_buffer_does_not_reach_into_the_record() -> None:
    pool = np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16)
    logits = np.arange(4, dtype=np.float32)
    record = PrefillRecord([{"ffn_out": pool}], pool[1:], logits[:], 3)
    step = DecodeStepRecord(logits, 3)
    probe = DecodeProbe(step, [{"ffn_out": pool[0]}], pool[0])
    pool[:] = 99
    logits[:] = 99
    assert record.layer_intermediates[0]["ffn_out"].astype(float).max() == 5
    assert record.layer_intermediates[0]["ffn_out"].dtype == ml_dtypes.bfloat16
    assert record.final_hidden_normed.astype(float).max() == 5
    assert record.logits_at_pred.max() == step.lm_head_logits.max() == 3
    assert probe.layer_intermediates[0]["ffn_out"].astype(float).max() == 2
    assert probe.final_hidden_normed.astype(float).max() == 2


def test_records_cannot_be_written_to() -> None:
    record = PrefillRecord([{"ffn_out": np.zeros((1, 2))}], np.zeros((1, 2)), np.zeros(3), np.int64(1))
    assert type(record.top1_token) is int
    with pytest.raises(ValueError, match="read-only"):
        record.logits_at_pred[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        record.layer_intermediates[0]["ffn_out"][0, 0] = 1
    with pytest.raises(AttributeError):
        record.top1_token = 2  # type: ignore[misc]


def test_a_foreign_record_is_copied_by_its_fields() -> None:
    buffer = np.ones(3)
    foreign = SimpleNamespace(
        layer_intermediates=[], final_hidden_normed=np.empty(0), logits_at_pred=buffer, top1_token=0
    )
    record = PrefillRecord.copy_of(foreign)
    step = DecodeStepRecord.copy_of(SimpleNamespace(lm_head_logits=buffer, top1_token=0))
    buffer[:] = 7
    assert record.logits_at_pred.tolist() == step.lm_head_logits.tolist() == [1, 1, 1]


def test_a_structural_runner_is_a_runner_and_probes_are_optional() -> None:
    class Foreign:
        name = "foreign"

        def prefill(self, prompt_tokens: object) -> None: ...

        def decode_step(self, input_token: int, current_pos: int) -> None: ...

    assert isinstance(Foreign(), NpuRunner)
    assert not isinstance(Foreign(), ProbedRunner)
