"""Phase 5: multi-launch merge, buffer reuse and layout of a decode step."""

from __future__ import annotations

from llms.verify.contract.deployment import NO_DEVICE, Deployment, Device
from llms.verify.contract.outcome import Outcome
from llms.verify.gates import optimisation as judging
from llms.verify.gates.optimisation import Step
from llms.verify.reference.hf import HFReference


def decode_gate(deployment: Deployment, reference: HFReference, *, device: Device = NO_DEVICE) -> Outcome:
    """Every optimisation of a decode step, measured against the form before it. Raises NotOffered."""
    base, merged, final = judging.forms(deployment, reference, device)
    merge, reuse = judging.common_steps(base, merged, final, "decode")
    if deployment.config().n_layers == 1:
        reuse = Step(reuse.name, reason="one layer: there is no other one to share buffers with")
    steps = [merge, reuse, *judging.layout_steps(deployment, "decode")]
    return judging.phase_outcome(5, "decode", base, final, steps)
