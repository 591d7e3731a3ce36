"""All sixteen prompts of both sets pass the token-set gate on the clean twin."""

from __future__ import annotations

from typing import Any

import pytest

from llms.llama_kernel_builder import driver
from llms.verify.contract.deployment import Deployment
from llms.verify.gates.phase6 import gate as gates


@pytest.mark.slow
@pytest.mark.parametrize("style", ["instruct", "base"])
def test_token_set_gate_on_every_prompt(style: Any) -> None:
    driver.select("twin")
    smollm2 = Deployment.from_folder("smollm2_135m")
    outcome = gates.topk_gate(smollm2, smollm2.hf_reference(), smollm2.prompts(None, style))
    assert len(outcome.payload["prompts"]) == 8
    assert outcome.ok, outcome.message
