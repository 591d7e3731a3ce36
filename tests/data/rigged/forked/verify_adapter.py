"""The runner has a path of its own: what the gate sees is not what users run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import forked_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.llama_kernel_builder.deployment.production import ProductionFunctions
from llms.qwen2.qwen2_inference import SEQUENCE

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]
production = inference

_copy = ProductionFunctions(lambda: SEQUENCE)
verify_only: Any = SimpleNamespace(
    MODEL="forked",
    SEQUENCE=SEQUENCE,
    prepare_runtime=_copy.prepare_runtime,
    run_npu_prefill=_copy.run_npu_prefill,
    run_npu_decode_step=_copy.run_npu_decode_step,
)
build_runner = honest(verify_only).build_runner
