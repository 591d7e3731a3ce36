"""Phase 3: the whole model with one ELF per kernel: token-set gate, table of layers, baseline times."""

import pytest

from llms import optimisation

pytestmark = pytest.mark.phase3


def test_unfused_model(deployment, hf_reference, npu_lock, npu_record):
    outcome, payloads = optimisation.baseline_gate(deployment, hf_reference, device=npu_lock)
    for kind, payload in payloads.items():
        npu_record(kind, payload)
    assert outcome.ok, outcome.message
