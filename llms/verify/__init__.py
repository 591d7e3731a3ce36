"""Gates that judge a deployment: they know no model and no device.

A gate in three lines, with :mod:`llms.verify.gates.phase6.gate`::

    deployment = Deployment.from_folder("smollm2_135m")
    outcome = gate.topk_gate(deployment, deployment.hf_reference(), deployment.prompts(2))
    assert outcome.ok, outcome.message

What an adapter's runner returns is here as well. Nothing imports torch or transformers before a tokenizer, a
runner or the reference is used.
"""

from llms.verify.contract.deployment import Deployment
from llms.verify.contract.models import DeploymentError
from llms.verify.contract.outcome import Outcome
from llms.verify.contract.records import DecodeProbe, DecodeStepRecord, NpuRunner, PrefillRecord

__all__ = [
    "DecodeProbe",
    "DecodeStepRecord",
    "Deployment",
    "DeploymentError",
    "NpuRunner",
    "Outcome",
    "PrefillRecord",
]
