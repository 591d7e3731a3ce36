"""Phase 4: multi-launch merge, buffer reuse, compiled length and layout of the prefill."""

from __future__ import annotations

from llms.verify.contract.deployment import NO_DEVICE, Deployment, Device
from llms.verify.contract.outcome import Outcome
from llms.verify.gates import measure
from llms.verify.gates import optimisation as judging
from llms.verify.gates.optimisation import Step
from llms.verify.reference.hf import HFReference


def prefill_gate(deployment: Deployment, reference: HFReference, *, device: Device = NO_DEVICE) -> Outcome:
    """Every optimisation of the prefill, measured against the form before it. Raises NotOffered."""
    base, merged, final = judging.forms(deployment, reference, device)
    steps = [*judging.common_steps(base, merged, final, "prefill")]
    longer = measure.longer_prefill(deployment, device=device)
    name = "compiled length: the smallest that holds the prompt"
    if longer is None:
        steps.append(Step(name, reason="the prompt needs the longest compiled length"))
    else:
        seq_len, before = longer
        step = Step(f"{name} ({seq_len} to {final.seq_len})", before, final.prefill)
        steps.append(judging.gated(step, final))
    steps += judging.layout_steps(deployment, "prefill")
    return judging.phase_outcome(4, "prefill", base, final, steps)
