"""The gates as functions: capture on the device, compare after it is released, return what to report.

A test of a model is a call of one of these plus an assertion; nothing here knows pytest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llms.verify.contract.capture import capture, capture_diagnosis
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import NO_DEVICE, Deployment, Device
from llms.verify.contract.outcome import Outcome
from llms.verify.contract.topk import N_TOKENS, judge
from llms.verify.gates.payloads import describe_failure, diagnosis_payload, topk_gate_payload
from llms.verify.gates.phase6.diagnosis import NOT_OFFERED, Diagnosis, diagnose
from llms.verify.reference.hf import HFReference

# Lowest median cosine of a layer against plain HF bf16. SmolLM2-135M-Instruct (Q4_1 dequantised to bf16)
# on the twin, first instruct prompt: a correct device 0.988, a skipped middle layer 0.945. The minimum over
# positions is no yardstick: a correct device reaches 0.79 where single positions carry huge activations.
MEDIAN_LIMIT = 0.97


def sequence_length(prompts: Sequence[EncodedPrompt], n_tokens: int) -> int:
    """Positions that the longest prompt and its generation need."""
    return max((len(prompt) for prompt in prompts), default=1) + n_tokens


def topk_gate(
    deployment: Deployment,
    reference: HFReference,
    prompts: Sequence[EncodedPrompt],
    n_tokens: int = N_TOKENS,
    *,
    device: Device = NO_DEVICE,
) -> Outcome:
    """Token-set gate over `prompts`: both sides generate greedily, judged at the first divergence.

    `device` is held while the device works (the NPU lock on silicon), not while the reference runs.
    """
    max_seq = sequence_length(prompts, n_tokens)
    with deployment.on_device(device, [len(prompt) for prompt in prompts], max_seq=max_seq) as runner:
        captures = [capture(runner, prompt.ids, n_tokens=n_tokens) for prompt in prompts]
    traces = [reference.run(prompt.ids, n_tokens).trace() for prompt in prompts]
    reference.release()
    result = judge([one.trace for one in captures], traces, n_tokens=n_tokens)
    payload = topk_gate_payload(result, [prompt.text for prompt in prompts], deployment.tokenizer)
    return Outcome("topk_gate", result.ok, payload, "" if result.ok else describe_failure(payload))


def diagnosis_problems(found: Diagnosis) -> list[str]:
    """What no rounding explains: odd or missing records, values not finite, a layer that breaks away."""
    problems = list(found.problems)
    problems += [
        f"{row.path}: layer {row.layer} {row.probe} is missing: {row.reason}"
        for row in found.missing
        if not row.reason.startswith(NOT_OFFERED)
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
    device: Device = NO_DEVICE,
) -> tuple[Diagnosis, dict[str, Any]]:
    """Cosine per layer against the reference, prefill and decode, both sides fed the reference's tokens.

    Raises NotOffered for a reference that does not show its layers.
    """
    run = reference.run(prompt.ids, n_tokens).with_layers()
    reference.release()
    max_seq = sequence_length([prompt], n_tokens)
    with deployment.on_device(device, [len(prompt)], max_seq=max_seq) as runner:
        captured = capture_diagnosis(runner, prompt.ids, run.fed)
    found = diagnose(captured, run)
    return found, diagnosis_payload(found, prompt.text)


def diagnosis_gate(
    deployment: Deployment, reference: HFReference, prompt: EncodedPrompt, *, device: Device = NO_DEVICE
) -> Outcome:
    """:func:`layer_diagnosis` with its verdict, which judges only what is broken."""
    table, payload = layer_diagnosis(deployment, reference, prompt, device=device)
    return Outcome.of("diagnosis", "cosine per layer", diagnosis_problems(table), payload)
