"""Phase 5: every optimisation of a decode step, measured against the form before it."""

import pytest

from llms import optimisation

pytestmark = pytest.mark.phase5


def test_decode_steps(deployment, hf_reference, npu_lock, npu_record):
    outcome = optimisation.decode_gate(deployment, hf_reference, device=npu_lock)
    npu_record("optimisation", outcome.payload)
    assert outcome.ok, outcome.message
