"""Phase 4: every optimisation of the prefill, measured against the form before it."""

import pytest

from llms import optimisation

pytestmark = pytest.mark.phase4


def test_prefill_steps(deployment, hf_reference, npu_lock, npu_record):
    outcome = optimisation.prefill_gate(deployment, hf_reference, device=npu_lock)
    npu_record("optimisation", outcome.payload)
    assert outcome.ok, outcome.message
