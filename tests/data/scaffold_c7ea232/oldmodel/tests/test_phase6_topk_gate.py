"""Phase 6: the token-set gate on the production path."""

import pytest

from llms.verify import gates

pytestmark = pytest.mark.phase6


def test_topk_gate(deployment, hf_reference, npu_options, npu_lock, npu_record):
    prompts = deployment.prompts(npu_options.prompts)
    outcome = gates.topk_gate(deployment, hf_reference, prompts, npu_options.n_tokens, device=npu_lock)
    npu_record("topk_gate", outcome.payload)
    assert outcome.ok, outcome.message
