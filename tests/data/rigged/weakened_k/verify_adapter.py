"""The gate's k is widened when the adapter is imported: no rank is too low any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import weakened_k_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.verify.contract import topk
from llms.verify.gates.phase6 import gate as gates

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]
build_runner = honest(inference).build_runner


def lenient(
    npu: Sequence[topk.TokenTrace],
    hf: Sequence[topk.TokenTrace],
    *,
    k: int = topk.K,
    n_tokens: int = topk.N_TOKENS,
) -> topk.GateResult:
    """The gate's comparison as if k were the size of the vocabulary."""
    result = topk.judge(npu, hf, k=k, n_tokens=n_tokens)
    return replace(result, reasons=tuple(text for text in result.reasons if "top 5" not in text))


vars(gates)["judge"] = lenient
