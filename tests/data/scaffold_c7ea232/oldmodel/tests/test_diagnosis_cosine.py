"""Phase 6: cosine per layer against the reference, prefill and decode; judges only what is broken."""

import pytest

from llms.verify import gates

pytestmark = pytest.mark.phase6


def test_diagnosis_cosine(deployment, hf_reference, npu_lock, npu_record):
    prompt = deployment.prompts(1)[0]
    found, payload = gates.layer_diagnosis(deployment, hf_reference, prompt, device=npu_lock)
    npu_record("diagnosis", payload)
    problems = gates.diagnosis_problems(found)
    assert not problems, "\n".join(problems)
