"""Phase 3: the model with one ELF per kernel passes the token-set gate, and its times are the baseline."""

from __future__ import annotations

from llms.verify.contract.abilities.forms import UNFUSED
from llms.verify.contract.deployment import NO_DEVICE, Deployment, Device
from llms.verify.contract.outcome import Outcome
from llms.verify.gates import measure
from llms.verify.gates.optimisation import head
from llms.verify.gates.payloads import describe_failure, diagnosis_payload, topk_gate_payload
from llms.verify.gates.phase6.diagnosis import Diagnosis, diagnose
from llms.verify.reference.hf import HFReference


def baseline_gate(
    deployment: Deployment, reference: HFReference, *, device: Device = NO_DEVICE
) -> tuple[Outcome, ...]:
    """Token-set gate, table of layers (where the runner shows them) and times of the unfused form.

    The last outcome, `optimisation`, has the problems of all. Raises NotOffered.
    """
    base = measure.measured(deployment, reference, UNFUSED, device=device)
    topk = topk_gate_payload(base.gate, [base.prompt.text], deployment.tokenizer)
    problems = [] if base.gate.ok else [describe_failure(topk)]
    outcomes = [Outcome("topk_gate", base.gate.ok, topk, "\n".join(problems))]
    if base.inside is not None:
        layers = diagnose(base.inside, reference.run(base.prompt.ids, measure.PROBED_TOKENS))
        odd = table_problems(layers)
        payload = diagnosis_payload(layers, base.prompt.text)
        outcomes.append(Outcome.of("diagnosis", "cosine per layer", odd, payload))
        problems += odd
    sections = {"prefill": base.prefill, "decode": base.decode}
    for section, timed in sections.items():
        if not timed.ms > 0:
            problems.append(f"{section} took {timed.ms} ms on the device clock: nothing was measured")
    payload = {
        **head(3, None, base),
        "steps": [],
        "status": "FAIL" if problems else "OK",
        "problems": problems,
        "dispatch": {section: measure.summary(timed.dispatch) for section, timed in sections.items()},
    }
    return (*outcomes, Outcome.of("optimisation", "phase 3", problems, payload))


def table_problems(layers: Diagnosis) -> list[str]:
    """What is wrong with a per-layer table as such: odd records, missing rows, values not finite."""
    missing = [
        f"{row.path}: layer {row.layer} {row.probe} is missing: {row.reason}" for row in layers.missing
    ]
    return [*layers.problems, *missing]
