"""Gates that judge a deployment: they know no model and no device.

A gate in three lines, with :mod:`llms.verify.gates`::

    deployment = Deployment.from_folder("smollm2_135m")
    outcome = gates.topk_gate(deployment, deployment.hf_reference(), deployment.prompts(2))
    assert outcome.ok, outcome.message

Nothing here imports torch or transformers before a tokenizer, a runner or the reference is used.
"""

from llms.verify.capture import Capture, DiagnosisCapture, capture_diagnosis
from llms.verify.chat import EncodedPrompt, encode_chat, encode_prompt, stop_ids
from llms.verify.deployment import Deployment, DeploymentError, find_folder, known_models, load_adapter
from llms.verify.diagnosis import Diagnosis, LayerRow, MissingRow, diagnose
from llms.verify.ladder import LadderOutcome, run_ladder
from llms.verify.ladder_types import RungResult
from llms.verify.matched_reference import MatchedReference, MatchedRun
from llms.verify.prompts import DIAGNOSIS_PROMPT, PromptStyle, load_prompts
from llms.verify.records import DecodeProbe, DecodeStepRecord, NpuRunner, PrefillRecord, ProbedRunner
from llms.verify.reference import HFReference, HFRunner, ReferenceRun
from llms.verify.reference_cache import ReferenceCache
from llms.verify.report_model import describe_failure, diagnosis_payload, topk_gate_payload
from llms.verify.thresholds import Thresholds
from llms.verify.topk import (
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
