"""Phase 0: weights, configuration, rotary angles, tokens and the reference run."""

import pytest

from llms.verify import phase0

pytestmark = pytest.mark.phase0


@pytest.mark.parametrize("check", phase0.CHECKS)
def test_reference(check, deployment, hf_reference, npu_options, npu_record):
    outcome = phase0.run(check, deployment, hf_reference, npu_options.n_tokens)
    npu_record("phase0", outcome.payload)
    assert outcome.ok, outcome.message
