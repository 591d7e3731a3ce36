"""Phase 3: the rungs that compare with a reference."""

import pytest

from llms.verify import ladder

pytestmark = pytest.mark.phase3


@pytest.mark.parametrize("rung", ladder.REFERENCE_RUNGS)
def test_ladder(rung, deployment, hf_reference, npu_options, npu_lock, npu_record):
    prompts = deployment.prompts(npu_options.prompts)
    outcome = ladder.climb(deployment, hf_reference, prompts, npu_options.n_tokens, device=npu_lock)
    for kind, payload in outcome.payloads_of(rung).items():
        npu_record(kind, payload)
    result = outcome.rung(rung)
    if result.status == "not offered":
        pytest.skip(f"not offered: {result.reason}")
    assert result.ok, result.message()
