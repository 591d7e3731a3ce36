"""The gates as functions: capture on the device, compare after it is released, return what to report.

A test of a model is a call of one of these plus an assertion; nothing here knows pytest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import Deployment
from llms.verify.contract.topk import N_TOKENS, judge
from llms.verify.gates.payloads import describe_failure, diagnosis_payload, topk_gate_payload
from llms.verify.gates.phase6.diagnosis import Diagnosis, diagnose
from llms.verify.reference.hf import HFReference

# Lowest median cosine of a layer against plain HF bf16. SmolLM2-135M-Instruct (Q4_1 dequantised to bf16)
# on the twin, first instruct prompt: a correct device 0.988, a skipped middle layer 0.945. The minimum over
# positions is no yardstick: a correct device reaches 0.79 where single positions carry huge activations.
MEDIAN_LIMIT = 0.97


@dataclass(frozen=True)
class GateOutcome:
    """Verdict, JSON-able payload for the report, and the text of a failure (empty when it passed)."""

    ok: bool
    payload: dict[str, Any]
    message: str


def sequence_length(prompts: Sequence[EncodedPrompt], n_tokens: int) -> int:
    """Positions that the longest prompt and its generation need."""
    return max((len(prompt) for prompt in prompts), default=1) + n_tokens


@contextmanager
def _device_section(
    deployment: Deployment,
    prompts: Sequence[EncodedPrompt],
    max_seq: int,
    device: AbstractContextManager[Any] | None,
) -> Iterator[None]:
    """Build and prepare the runner, then hold the device until its contexts are closed again.

    Loading weights and compiling need no device, so they come before it is taken.
    """
    runner = deployment.runner(max_seq)
    prepare = getattr(runner, "prepare", None)
    if callable(prepare):
        for length in sorted({len(prompt) for prompt in prompts}):
            prepare(length)
    with device if device is not None else nullcontext():
        try:
            yield
        finally:
            deployment.release_runners()


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
    with _device_section(deployment, prompts, max_seq, device):
        captures = [deployment.capture(prompt, n_tokens=n_tokens, max_seq=max_seq) for prompt in prompts]
    traces = [reference.run(prompt.ids, n_tokens).trace() for prompt in prompts]
    reference.release()
    result = judge([capture.trace for capture in captures], traces, n_tokens=n_tokens)
    payload = topk_gate_payload(result, [prompt.text for prompt in prompts], deployment.tokenizer)
    return GateOutcome(result.ok, payload, "" if result.ok else describe_failure(payload))


def diagnosis_problems(found: Diagnosis) -> list[str]:
    """What no rounding explains: odd or missing records, values not finite, a layer that breaks away."""
    problems = list(found.problems)
    problems += [
        f"{row.path}: layer {row.layer} {row.probe} is missing: {row.reason}" for row in found.missing
    ]
    for path in ("prefill", "decode"):
        for row in found.rows:
            if row.path == path and not row.cos_median >= MEDIAN_LIMIT:
                problems.append(
                    f"{path}: layer {row.layer} {row.probe} breaks away, median cosine {row.cos_median:.4f}, "
                    f"limit {MEDIAN_LIMIT}"
                )
                break
    return problems


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
    max_seq = sequence_length([prompt], n_tokens)
    with _device_section(deployment, [prompt], max_seq, device):
        captured = deployment.capture_diagnosis(prompt, run.fed, max_seq=max_seq)
    found = diagnose(captured, run)
    return found, diagnosis_payload(found, prompt.text)
