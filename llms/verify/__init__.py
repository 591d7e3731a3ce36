"""Gates that judge a deployment: they know no model and no device.

A gate in three lines, with :mod:`llms.verify.gates.phase6.gate`::

    deployment = Deployment.from_folder("smollm2_135m")
    outcome = gates.topk_gate(deployment, deployment.hf_reference(), deployment.prompts(2))
    assert outcome.ok, outcome.message

Nothing here imports torch or transformers before a tokenizer, a runner or the reference is used.
"""

from llms.verify.contract.capture import Capture, DiagnosisCapture, capture_diagnosis
from llms.verify.contract.chat import EncodedPrompt, encode_chat, encode_prompt, stop_ids
from llms.verify.contract.deployment import (
    Deployment,
    DeploymentError,
    find_folder,
    known_models,
    load_adapter,
)
from llms.verify.contract.prompts import DIAGNOSIS_PROMPT, PromptStyle, load_prompts
from llms.verify.contract.records import (
    DecodeProbe,
    DecodeStepRecord,
    NpuRunner,
    PrefillRecord,
    ProbedRunner,
)
from llms.verify.contract.topk import (
    N_TOKENS,
    GateResult,
    K,
    PromptVerdict,
    TokenStep,
    TokenTrace,
    judge,
    judge_prompt,
    top_k,
)
from llms.verify.gates.payloads import describe_failure, diagnosis_payload, topk_gate_payload
from llms.verify.gates.phase6.diagnosis import Diagnosis, LayerRow, MissingRow, diagnose
from llms.verify.ladder.climbing import LadderOutcome, run_ladder
from llms.verify.ladder.thresholds import Thresholds
from llms.verify.ladder.types import RungResult
from llms.verify.reference.cache import ReferenceCache
from llms.verify.reference.hf import HFReference, HFRunner, ReferenceRun
from llms.verify.reference.matched import MatchedReference, MatchedRun

__all__ = [
    "DIAGNOSIS_PROMPT",
    "N_TOKENS",
    "Capture",
    "DecodeProbe",
    "DecodeStepRecord",
    "Deployment",
    "DeploymentError",
    "Diagnosis",
    "DiagnosisCapture",
    "EncodedPrompt",
    "GateResult",
    "HFReference",
    "HFRunner",
    "K",
    "LadderOutcome",
    "LayerRow",
    "MatchedReference",
    "MatchedRun",
    "MissingRow",
    "NpuRunner",
    "PrefillRecord",
    "ProbedRunner",
    "PromptStyle",
    "PromptVerdict",
    "ReferenceCache",
    "ReferenceRun",
    "RungResult",
    "Thresholds",
    "TokenStep",
    "TokenTrace",
    "capture_diagnosis",
    "describe_failure",
    "diagnose",
    "diagnosis_payload",
    "encode_chat",
    "encode_prompt",
    "find_folder",
    "judge",
    "judge_prompt",
    "known_models",
    "load_adapter",
    "load_prompts",
    "run_ladder",
    "stop_ids",
    "top_k",
    "topk_gate_payload",
]
