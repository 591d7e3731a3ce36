"""Phase 6: all rungs of the ladder on the production path."""

import pytest

from llms.verify import ladder

pytestmark = pytest.mark.phase6


@pytest.mark.parametrize("rung", ladder.RUNGS)
def test_ladder(rung, deployment, hf_reference, npu_options, npu_lock, npu_record):
    prompts = deployment.prompts(npu_options.prompts)
    outcome = ladder.climb(deployment, hf_reference, prompts, npu_options.n_tokens, device=npu_lock)
    for kind, payload in outcome.payloads_of(rung).items():
        npu_record(kind, payload)
    result = outcome.rung(rung)
    if result.status == "not offered":
        pytest.skip(f"not offered: {result.reason}")
    assert result.ok, result.message()


@pytest.mark.slow
def test_compiled_lengths(deployment, npu_lock, npu_record):
    result = ladder.compiled_lengths(deployment, deployment.prompts(1)[0].ids, 512, device=npu_lock)
    npu_record("limits", dict(result.data))
    assert result.status == "passed", result.message()
