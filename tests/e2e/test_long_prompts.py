"""The compiled length of 1024: a long prompt through the token-set gate on the clean twin."""

from __future__ import annotations

import pytest

from llms.llama_kernel_builder import driver
from llms.llama_kernel_builder.llama_loop import bucket_for
from llms.verify.contract.deployment import Deployment
from llms.verify.gates.phase6 import gate as gates


@pytest.mark.slow
def test_token_set_gate_on_a_prompt_of_900_tokens() -> None:
    driver.select("twin")
    smollm2 = Deployment.from_folder("smollm2_135m")
    texts = [prompt.text for style in ("instruct", "base") for prompt in smollm2.prompts(None, style)]
    prompt = smollm2.encode("Answer the first of these questions. " + " ".join(texts * 5), "instruct")
    assert bucket_for(len(prompt), smollm2.config().max_position) == 1024
    outcome = gates.topk_gate(smollm2, smollm2.hf_reference(), [prompt])
    assert outcome.ok, outcome.message
    assert outcome.payload["prompts"][0]["n_steps"] == 32
