"""Phase 2: one assembled layer against layer 0 of the reference."""

import pytest

from llms.verify import phase2

pytestmark = pytest.mark.phase2


def test_block(deployment, hf_reference, npu_lock, npu_record):
    outcome = phase2.block_gate(deployment, hf_reference, deployment.prompts(2), device=npu_lock)
    npu_record("block", outcome.payload)
    assert outcome.ok, outcome.message
