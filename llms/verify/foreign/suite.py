"""What an adopted deployment has beside the tests of `llms.verify.suite`: tests of foreign habits.

Nothing of the folder is imported in this process, so the phases that look at the deployment's own objects are
not offered: its kernels one by one (phase 1) and the audit, which watches its calls (phase 7).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llms.verify.contract.outcome import Outcome
from llms.verify.foreign import habits
from llms.verify.foreign.remote import RemoteAdapter, RemoteDeployment
from llms.verify.reference.hf import HFReference

Record = Callable[[str, Any], None]


@pytest.mark.phase1
def test_kernel() -> None:
    """Kernels one by one are not offered."""
    pytest.skip("not offered: a foreign adapter does not hand out its kernels")


@pytest.mark.phase7
def test_independent_audit() -> None:
    """The audit is not offered."""
    pytest.skip("not offered: the audit watches calls inside of a process, a foreign adapter has its own")


def judge_habit(adapter: RemoteAdapter, record: Record, outcome: Outcome) -> None:
    """Record, warn of what decides nothing, fail for what does."""
    record(outcome.kind, outcome.payload)
    for note in outcome.notes:
        adapter.warn(note)
    assert outcome.ok, outcome.message


@pytest.mark.phase0
def test_contract(foreign_adapter: RemoteAdapter, npu_record: Record) -> None:
    """Names, signatures and fields of the contract."""
    judge_habit(foreign_adapter, npu_record, habits.contract(foreign_adapter))


@pytest.mark.phase3
def test_records(deployment: RemoteDeployment, npu_lock: Any, npu_record: Record) -> None:
    """Records are copies of what happened, complete, and of the production run."""
    prompt = deployment.prompts(1)[0]
    judge_habit(deployment.adapter, npu_record, habits.records(deployment, prompt, device=npu_lock))


@pytest.mark.phase6
def test_end_of_text(
    deployment: RemoteDeployment, hf_reference: HFReference, npu_lock: Any, npu_record: Record
) -> None:
    """A prompt with end-of-text tokens inside is predicted from its last row."""
    prompt = deployment.prompts(1)[0]
    outcome = habits.end_of_text(deployment, hf_reference, prompt, device=npu_lock)
    judge_habit(deployment.adapter, npu_record, outcome)
