"""One form of a deployment, measured: what it dispatches, how long it takes, what it says.

A form (:class:`llms.verify.contract.abilities.Form`) is the same production functions with one optimisation
more or less; the runner builds it (ability ``forms()``). Times are on the device clock, set-up excluded; the
first run of a form (contexts open, caches fill) is the token-set gate's and never a time of the prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from llms.verify.contract.abilities import needed
from llms.verify.contract.abilities.forms import (
    PRODUCTION,
    UNFUSED,
    BuiltForm,
    Dispatch,
    Form,
    Forms,
    LeafKernel,
    TimedStep,
)
from llms.verify.contract.capture import DiagnosisCapture, capture_diagnosis
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import NO_DEVICE, Deployment, Device
from llms.verify.contract.records import Array
from llms.verify.contract.topk import N_TOKENS, GateResult, TokenStep, TokenTrace, judge
from llms.verify.gates.phase1 import kernel_laws
from llms.verify.reference.hf import HFReference

# Runs are repeated until two agree, at least twice; 20 are what the mlir-air LLM examples time.
FEWEST_RUNS, MOST_RUNS, AGREEMENT = 2, 20, 2e-3
PROBED_TOKENS = 4


def rounds_inside(kernel: LeafKernel) -> bool:
    """True for GEMM `direct` with bf16 output and for the cascade GEMV over more than one pass of K."""
    if kernel.op == "gemm":
        return kernel.method == "direct" and kernel.dtype_out == "bf16"
    return kernel.op == "gemv_add" and kernel.dim("K") > kernel_laws.CASCADE_PASS


def low_tier(dispatch: Dispatch) -> dict[LeafKernel, int]:
    """Launches whose arithmetic rounds inside the sum over K: fast, and less exact."""
    return {kernel: n for kernel, n in dispatch.kernels if rounds_inside(kernel)}


def summary(dispatch: Dispatch) -> dict[str, int]:
    """JSON-able counts."""
    return {
        "elf_calls": dispatch.calls,
        "launches": dispatch.launches,
        "writes": dispatch.writes,
        "reads": dispatch.reads,
        "bytes_written": dispatch.bytes_written,
        "bytes_read": dispatch.bytes_read,
        "low_tier_launches": sum(low_tier(dispatch).values()),
    }


@dataclass(frozen=True)
class Timed:
    """Time of one section in milliseconds on the device clock, and what it dispatched."""

    ms: float
    dispatch: Dispatch


@dataclass(frozen=True, eq=False)
class Measured:
    """Both sections, tokens and logits of one form.

    `logits`: [n_tokens, vocab] float32. `inside`: layer outputs, of the unfused form only.
    """

    form: Form
    clock: str
    prompt: EncodedPrompt
    seq_len: int
    prefill: Timed
    decode: Timed
    gate: GateResult
    logits: Array
    runs: tuple[int, int]
    inside: DiagnosisCapture | None = None


def forms_of(deployment: Deployment) -> Forms:
    """What builds the forms of a deployment. Raises NotOffered for a runner that has none."""
    try:
        forms: Forms = needed(deployment.runner(1), "forms")()
    finally:
        deployment.release_runners()
    return forms


def measured(
    deployment: Deployment, reference: HFReference, form: Form, *, device: Device = NO_DEVICE
) -> Measured:
    """Measure a form on the first prompt of the deployment's set; once per deployment.

    Raises NotOffered, and what compilation and device raise.
    """
    return deployment.once(("form", form), lambda: _measure(deployment, reference, form, device))


def longer_prefill(deployment: Deployment, *, device: Device = NO_DEVICE) -> tuple[int, Timed] | None:
    """The next compiled length and the prefill of the production form in it; None when there is none.

    Measured once per deployment.
    """
    return deployment.once("longer prefill", lambda: _measure_longer(deployment, device))


def _measure(deployment: Deployment, reference: HFReference, form: Form, device: Device) -> Measured:
    prompt = deployment.prompts(1)[0]
    forms = forms_of(deployment)
    run = reference.run(prompt.ids, N_TOKENS)
    reference.release()
    n = len(prompt)
    # One decode step more than the gate has: the one whose dispatch is counted.
    built = forms.build(form, n + N_TOKENS + 1)
    built.prepare(n)
    inside = None
    with device:
        try:
            steps = _generate(built, prompt.ids)
            decode = _dispatch(built.decode_step(steps[-1].token, n + len(steps) - 1, counted=True))
            prefill, prefill_times = _repeated(lambda counted: built.prefill(prompt.ids, counted=counted))
            if form == UNFUSED:
                inside = capture_diagnosis(built.runner(), prompt.ids, run.fed[: PROBED_TOKENS - 1])
        finally:
            built.close()
    traced = tuple(TokenStep.from_logits(step.token, step.logits) for step in steps)
    return Measured(
        form=form,
        clock=built.clock,
        prompt=prompt,
        seq_len=_compiled(forms, n)[0],
        prefill=Timed(median(prefill_times) * 1e3, prefill),
        decode=Timed(median(step.seconds for step in steps[1:]) * 1e3, decode),
        gate=judge([TokenTrace(prompt.ids, traced)], [run.trace()]),
        logits=np.stack([step.logits for step in steps]),
        runs=(len(prefill_times), len(steps) - 1),
        inside=inside,
    )


def _generate(built: BuiltForm, ids: Sequence[int]) -> list[TimedStep]:
    """Greedy generation of the gate's tokens."""
    steps = [built.prefill(ids)]
    while len(steps) < N_TOKENS:
        steps.append(built.decode_step(steps[-1].token, len(ids) + len(steps) - 1))
    return steps


def _repeated(run: Callable[[bool], TimedStep]) -> tuple[Dispatch, list[float]]:
    """Run until two times agree; the first run is the one whose dispatch is counted."""
    first = run(True)
    times = [first.seconds]
    while len(times) < MOST_RUNS:
        times.append(run(False).seconds)
        if len(times) >= FEWEST_RUNS and abs(times[-1] - times[-2]) <= AGREEMENT * times[-2]:
            break
    return _dispatch(first), times


def _dispatch(step: TimedStep) -> Dispatch:
    if step.dispatch is None:
        raise TypeError("a step that was asked to count its dispatch did not: `counted` is ignored")
    return step.dispatch


def _compiled(forms: Forms, n: int) -> tuple[int, ...]:
    """Compiled lengths that hold `n` tokens, ascending."""
    return tuple(length for length in forms.compiled_lengths() if length >= n)


def _measure_longer(deployment: Deployment, device: Device) -> tuple[int, Timed] | None:
    prompt = deployment.prompts(1)[0]
    forms = forms_of(deployment)
    lengths = _compiled(forms, len(prompt))
    if len(lengths) < 2:
        return None
    # One token more than the shorter length holds takes the longer one; its cost knows no content.
    n = lengths[0] + 1
    ids = [*prompt.ids, *[prompt.ids[-1]] * (n - len(prompt))]
    built = forms.build(PRODUCTION, n)
    built.prepare(n)
    with device:
        try:
            built.prefill(ids)
            dispatch, times = _repeated(lambda counted: built.prefill(ids, counted=counted))
        finally:
            built.close()
    return lengths[1], Timed(median(times) * 1e3, dispatch)
