"""The tests of an adopted deployment: those that every model folder runs, and those of foreign habits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llms.verify.contract.outcome import Outcome
from llms.verify.foreign import habits
from llms.verify.foreign.remote import RemoteAdapter
from llms.verify.gates.phase0 import gate as phase0
from llms.verify.gates.phase2 import gate as phase2
from llms.verify.gates.phase6 import gate as phase6
from llms.verify.ladder import climbing

# SUITE-STANDIN-BEGIN


@pytest.mark.phase0
@pytest.mark.parametrize("check", phase0.CHECKS)
def test_reference(check, deployment, hf_reference, npu_options, npu_record):
    outcome = phase0.run(check, deployment, hf_reference, npu_options.n_tokens)
    npu_record("phase0", outcome.payload)
    assert outcome.ok, outcome.message


@pytest.mark.phase2
def test_block(deployment, hf_reference, npu_lock, npu_record):
    outcome = phase2.block_gate(deployment, hf_reference, deployment.prompts(2), device=npu_lock)
    npu_record("block", outcome.payload)
    assert outcome.ok, outcome.message


def rung_of(rung, deployment, hf_reference, npu_options, npu_lock, npu_record):
    prompts = deployment.prompts(npu_options.prompts)
    outcome = climbing.climb(deployment, hf_reference, prompts, npu_options.n_tokens, device=npu_lock)
    for kind, payload in outcome.payloads_of(rung).items():
        npu_record(kind, payload)
    result = outcome.rung(rung)
    if result.status == "not offered":
        pytest.skip(f"not offered: {result.reason}")
    assert result.ok, result.message()


@pytest.mark.phase3
@pytest.mark.parametrize("rung", climbing.REFERENCE_RUNGS)
def test_reference_ladder(rung, deployment, hf_reference, npu_options, npu_lock, npu_record):
    rung_of(rung, deployment, hf_reference, npu_options, npu_lock, npu_record)


@pytest.mark.phase6
def test_topk_gate(deployment, hf_reference, npu_options, npu_lock, npu_record):
    prompts = deployment.prompts(npu_options.prompts)
    outcome = phase6.topk_gate(deployment, hf_reference, prompts, npu_options.n_tokens, device=npu_lock)
    npu_record("topk_gate", outcome.payload)
    assert outcome.ok, outcome.message


@pytest.mark.phase6
def test_diagnosis_cosine(deployment, hf_reference, npu_lock, npu_record):
    prompt = deployment.prompts(1)[0]
    diagnosis, payload = phase6.layer_diagnosis(deployment, hf_reference, prompt, device=npu_lock)
    npu_record("diagnosis", payload)
    problems = phase6.diagnosis_problems(diagnosis)
    assert not problems, "\n".join(problems)


@pytest.mark.phase6
@pytest.mark.parametrize("rung", climbing.RUNGS)
def test_ladder(rung, deployment, hf_reference, npu_options, npu_lock, npu_record):
    rung_of(rung, deployment, hf_reference, npu_options, npu_lock, npu_record)


# SUITE-STANDIN-END


def judge_habit(adapter: RemoteAdapter, record: Callable[[str, Any], None], outcome: Outcome) -> None:
    """Record, warn of what decides nothing, fail for what does."""
    record(outcome.kind, outcome.payload)
    for note in outcome.notes:
        adapter.warn(note)
    assert outcome.ok, outcome.message


@pytest.mark.phase0
def test_contract(foreign_adapter, npu_record):
    """Names, signatures and fields of the contract."""
    judge_habit(foreign_adapter, npu_record, habits.contract(foreign_adapter))


@pytest.mark.phase3
def test_records(deployment, npu_lock, npu_record):
    """Records are copies of what happened, complete, and of the production run."""
    prompt = deployment.prompts(1)[0]
    judge_habit(deployment.adapter, npu_record, habits.records(deployment, prompt, device=npu_lock))


@pytest.mark.phase6
def test_end_of_text(deployment, hf_reference, npu_lock, npu_record):
    """A prompt with end-of-text tokens inside is predicted from its last row."""
    prompt = deployment.prompts(1)[0]
    outcome = habits.end_of_text(deployment, hf_reference, prompt, device=npu_lock)
    judge_habit(deployment.adapter, npu_record, outcome)
