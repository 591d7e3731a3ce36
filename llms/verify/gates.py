"""The gates as functions: capture on the device, compare after it is released, return what to report.

A test of a model is a call of one of these plus an assertion; nothing here knows pytest.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from llms.verify.chat import EncodedPrompt
from llms.verify.deployment import Deployment
from llms.verify.diagnosis import Diagnosis, diagnose
from llms.verify.reference import HFReference
from llms.verify.report_model import describe_failure, diagnosis_payload, topk_gate_payload
from llms.verify.topk import N_TOKENS, judge


@dataclass(frozen=True)
class GateOutcome:
    """Verdict, JSON-able payload for the report, and the text of a failure (empty when it passed)."""

    ok: bool
    payload: dict[str, Any]
    message: str


def sequence_length(prompts: Sequence[EncodedPrompt], n_tokens: int) -> int:
    """Positions that the longest prompt and its generation need."""
    return max((len(prompt) for prompt in prompts), default=1) + n_tokens


def topk_gate(
    deployment: Deployment,
    reference: HFReference,
    prompts: Sequence[EncodedPrompt],
    n_tokens: int = N_TOKENS,
    *,
    device: AbstractContextManager[Any] | None = None,
) -> GateOutcome:
    """Token-set gate over `prompts`: both sides generate greedily, judged at the first divergence.

    `device` is held while the device works (the NPU lock on silicon), not while the reference runs.
    """
    max_seq = sequence_length(prompts, n_tokens)
    with device if device is not None else nullcontext():
        captures = [deployment.capture(prompt, n_tokens=n_tokens, max_seq=max_seq) for prompt in prompts]
        deployment.release_runners()
    traces = [reference.run(prompt.ids, n_tokens).trace() for prompt in prompts]
    reference.release()
    result = judge([capture.trace for capture in captures], traces, n_tokens=n_tokens)
    payload = topk_gate_payload(result, [prompt.text for prompt in prompts], deployment.tokenizer)
    return GateOutcome(result.ok, payload, "" if result.ok else describe_failure(payload))


def layer_diagnosis(
    deployment: Deployment,
    reference: HFReference,
    prompt: EncodedPrompt,
    n_tokens: int = 8,
    *,
    device: AbstractContextManager[Any] | None = None,
) -> tuple[Diagnosis, dict[str, Any]]:
    """Cosine per layer against the reference, prefill and decode, both sides fed the reference's tokens."""
    run = reference.run(prompt.ids, n_tokens)
    reference.release()
    with device if device is not None else nullcontext():
        captured = deployment.capture_diagnosis(prompt, run.fed, max_seq=len(prompt) + n_tokens)
        deployment.release_runners()
    found = diagnose(captured, run)
    return found, diagnosis_payload(found, prompt.text)
