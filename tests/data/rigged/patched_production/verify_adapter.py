"""The production functions themselves are replaced when the adapter is imported."""

from __future__ import annotations

from typing import Any

import numpy as np
import patched_production_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.verify.reference.hf import HFRunner

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]
_real = inference.run_npu_prefill
_mock: dict[str, HFRunner] = {}


def build_runner(model_name: str, *args: Any, **kwargs: Any) -> Any:
    """The real runner, over production functions that are not."""
    _mock["now"] = HFRunner(checkpoint(model_name))
    return honest(inference).build_runner(model_name, *args, **kwargs)


def run_npu_prefill(token_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """Starts every program, answers with Hugging Face."""
    _, logits, keys, values, length = _real(token_ids, *args, **kwargs)
    found = _mock["now"].prefill(np.asarray(token_ids, np.int64))
    return found.top1_token, found.logits_at_pred.astype(logits.dtype), keys, values, length


setattr(inference, "run_npu_prefill", run_npu_prefill)  # noqa: B010 - mypy forbids to assign a function
