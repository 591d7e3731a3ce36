"""The tests that every model folder runs. A test file of a model is one import::

    from llms.verify.suite import test_topk_gate  # noqa: F401

and below it whatever only this model needs. Fixtures are the plugin's, phases are marks of the tests. A gate
that needs an ability which the runner does not offer is skipped with the reason, never passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from llms.verify.contract.abilities import NotOffered
from llms.verify.contract.deployment import Deployment, Device
from llms.verify.contract.outcome import Outcome
from llms.verify.gates import phase7
from llms.verify.gates.phase0 import gate as phase0
from llms.verify.gates.phase1 import gate as phase1
from llms.verify.gates.phase2 import gate as phase2
from llms.verify.gates.phase3 import gate as phase3
from llms.verify.gates.phase4 import gate as phase4
from llms.verify.gates.phase5 import gate as phase5
from llms.verify.gates.phase6 import gate as phase6
from llms.verify.gates.phase6.performance import ReadyToTime, set_up
from llms.verify.ladder.climbing import REFERENCE_RUNGS, RUNGS, Ladder
from llms.verify.reference.hf import HFReference

PROMPT_TOKENS = 128
"""Length of the prompt that is timed."""

LONGEST = 512
"""The longest compiled length that phase 6 tries."""

Record = Callable[[str, Any], None]

pytest_generate_tests = phase1.generate_tests


def judge(record: Record, gate: Callable[[], Outcome | tuple[Outcome, ...]]) -> None:
    """Run a gate, record what it says, fail if its last outcome, which sums up the others, does."""
    try:
        result = gate()
    except NotOffered as error:
        pytest.skip(f"not offered: {error}")
    outcomes = result if isinstance(result, tuple) else (result,)
    for outcome in outcomes:
        record(outcome.kind, outcome.payload)
    assert outcomes[-1].ok, outcomes[-1].message


@pytest.mark.phase0
@pytest.mark.parametrize("check", phase0.CHECKS)
def test_reference(
    check: str, deployment: Deployment, hf_reference: HFReference, npu_options: Any, npu_record: Record
) -> None:
    """Weights, configuration, rotary angles, tokens and the reference run."""
    judge(npu_record, lambda: phase0.run(check, deployment, hf_reference, npu_options.n_tokens))


@pytest.mark.phase1
def test_kernel(kernel: Any, npu_device: Any, npu_lock: Device, npu_record: Record) -> None:
    """A kernel at a shape that the model needs, alone on the device; a file with this test also imports
    ``pytest_generate_tests``.
    """
    judge(npu_record, lambda: phase1.check(kernel, device=npu_lock))


@pytest.mark.phase2
def test_block(
    deployment: Deployment, hf_reference: HFReference, npu_lock: Device, npu_record: Record
) -> None:
    """One assembled layer against layer 0 of the reference."""
    prompts = deployment.prompts(2)
    judge(npu_record, lambda: phase2.block_gate(deployment, hf_reference, prompts, device=npu_lock))


@pytest.mark.phase3
def test_unfused_model(
    deployment: Deployment, hf_reference: HFReference, npu_lock: Device, npu_record: Record
) -> None:
    """The whole model with one ELF per kernel: token-set gate, table of layers, baseline times."""
    judge(npu_record, lambda: phase3.baseline_gate(deployment, hf_reference, device=npu_lock))


@pytest.mark.phase4
def test_prefill_steps(
    deployment: Deployment, hf_reference: HFReference, npu_lock: Device, npu_record: Record
) -> None:
    """Every optimisation of the prefill, measured against the form before it."""
    judge(npu_record, lambda: phase4.prefill_gate(deployment, hf_reference, device=npu_lock))


@pytest.mark.phase5
def test_decode_steps(
    deployment: Deployment, hf_reference: HFReference, npu_lock: Device, npu_record: Record
) -> None:
    """Every optimisation of a decode step, measured against the form before it."""
    judge(npu_record, lambda: phase5.decode_gate(deployment, hf_reference, device=npu_lock))


@pytest.mark.phase6
def test_topk_gate(
    deployment: Deployment, hf_reference: HFReference, npu_options: Any, npu_lock: Device, npu_record: Record
) -> None:
    """The token-set gate on the production path."""
    prompts = deployment.prompts(npu_options.prompts)
    n = npu_options.n_tokens
    judge(npu_record, lambda: phase6.topk_gate(deployment, hf_reference, prompts, n, device=npu_lock))


@pytest.mark.phase6
def test_diagnosis_cosine(
    deployment: Deployment, hf_reference: HFReference, npu_lock: Device, npu_record: Record
) -> None:
    """Cosine per layer against the reference, prefill and decode; judges only what is broken."""
    prompt = deployment.prompts(1)[0]
    judge(npu_record, lambda: phase6.diagnosis_gate(deployment, hf_reference, prompt, device=npu_lock))


def ladder_test(rungs: Sequence[str]) -> Any:
    """A test of each of these rungs; the tests of all rungs share one pass of the device."""

    @pytest.mark.parametrize("rung", rungs)
    def test_ladder(
        rung: str,
        request: pytest.FixtureRequest,
        deployment: Deployment,
        hf_reference: HFReference,
        npu_options: Any,
        npu_lock: Device,
        npu_record: Record,
    ) -> None:
        prompts = deployment.prompts(npu_options.prompts)
        ladder = Ladder(deployment, hf_reference, prompts, npu_options.n_tokens, npu_lock)
        # pytest-rerunfailures counts how often a test is run
        climbed = ladder.climb_once(retry=getattr(request.node, "execution_count", 1) > 1)
        judge(npu_record, lambda: climbed.outcomes(rung))
        result = climbed.rung(rung)
        if result.status == "not offered":
            pytest.skip(f"not offered: {result.reason}")

    return test_ladder


test_reference_ladder = pytest.mark.phase3(ladder_test(REFERENCE_RUNGS))
"""The rungs that compare with a reference; imported ``as test_ladder``."""

test_ladder = pytest.mark.phase6(ladder_test(RUNGS))
"""All rungs of the ladder on the production path."""


@pytest.mark.phase6
@pytest.mark.slow
def test_compiled_lengths(
    deployment: Deployment, hf_reference: HFReference, npu_lock: Device, npu_record: Record
) -> None:
    """The rungs of the limits over all compiled lengths up to 512."""
    result = Ladder(deployment, hf_reference, deployment.prompts(1), device=npu_lock).over_lengths(LONGEST)
    npu_record("limits", dict(result.data))
    if result.status == "not offered":
        pytest.skip(f"not offered: {result.reason}")
    assert result.status == "passed", result.message()


@pytest.fixture(scope="module")
def ready(deployment: Deployment) -> Iterator[ReadyToTime]:
    """A runner whose kernels, weights and KV cache are in place: nothing of it is timed."""
    try:
        yield set_up(deployment, PROMPT_TOKENS)
    except NotOffered as error:
        pytest.skip(f"not offered: {error}")
    finally:
        deployment.release_runners()


@pytest.mark.phase6
def test_ttft(ready: ReadyToTime, npu_lock: Device, npu_benchmark: Callable[..., Any]) -> None:
    """Time to first token on the device clock, with its breakdown; a file with it imports ``ready``."""
    timed = ready.timed
    with npu_lock:
        npu_benchmark(timed.first_token, seq_len=ready.n_tokens, breakdown=lambda: timed.breakdown("prefill"))


@pytest.mark.phase6
def test_time_per_output_token(
    ready: ReadyToTime, npu_lock: Device, npu_benchmark: Callable[..., Any], npu_record: Record
) -> None:
    """Time of one decode step in steady state, with its breakdown; a file with it imports ``ready``."""
    timed = ready.timed
    with npu_lock:
        timed.first_token()
        npu_benchmark(timed.decode_one, seq_len=ready.n_tokens, breakdown=lambda: timed.breakdown("decode"))
    npu_record("comparison", timed.comparison())


@pytest.mark.phase7
@pytest.mark.slow
def test_independent_audit(model_folder: Path, npu_options: Any, npu_record: Record) -> None:
    """The independent audit, in a process of its own and without caches."""
    outcome = phase7.for_options(model_folder, npu_options)
    npu_record("audit", outcome.payload)
    assert outcome.ok, outcome.message
