"""Digests of what the twin and the matched reference compute for a fixed prompt and fixed decode tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).with_name("digests.json")
MODELS = ("smollm2_135m", "llama32_1b", "qwen2", "qwen3_0_6b")
PROMPT_TOKENS = 40
DECODE_STEPS = 8


def committed() -> dict[str, dict[str, str]]:
    """Digests in the repository: by model ``checkpoint`` (content hash), ``twin`` and ``matched``."""
    found: dict[str, dict[str, str]] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def digests(model: str) -> dict[str, str]:
    """Compute the digests of a model; all but SmolLM2 run on their tiny checkpoint, wherever this is.

    ``twin`` and ``matched`` are the first 24 hex digits of a SHA-256 over the logits of the prefill and of
    eight decode steps (f32) and over the KV cache that they leave (bf16).
    """
    from llms.verify.contract.deployment import Deployment
    from llms.verify.contract.models import find_model

    tiny = None if model == "smollm2_135m" else find_model(model).folder / "tiny"
    deployment = Deployment.from_folder(model, checkpoint=tiny, use_cache=False)
    vocabulary = int(deployment.config().vocab_size)
    # ids that are neither near each other nor special tokens
    tokens = [int(token) for token in 100 + np.arange(PROMPT_TOKENS + DECODE_STEPS) * 37 % (vocabulary - 100)]
    prompt, fed = tokens[:PROMPT_TOKENS], tokens[PROMPT_TOKENS:]
    runner: Any = deployment.runner(256, lite_mode=True)
    rows = [runner.prefill(np.array(prompt, np.int64)).logits_at_pred]
    rows += [runner.decode_step(token, PROMPT_TOKENS + i).lm_head_logits for i, token in enumerate(fed)]
    keys, values = (cache[:, :, : len(tokens)] for cache in runner.kv_cache())
    arithmetic = runner.device_arithmetic(len(prompt))
    run = deployment.matched_reference().run(prompt, DECODE_STEPS + 1, arithmetic=arithmetic, forced=fed)
    return {
        "checkpoint": deployment.checkpoint.content_hash[:24],
        "twin": _digest(np.stack(rows), keys, values),
        "matched": _digest(run.logits.astype(np.float32), run.keys, run.values),
    }


def _digest(logits: Any, keys: Any, values: Any) -> str:
    found = hashlib.sha256(np.ascontiguousarray(logits, np.float32).tobytes())
    for cache in (keys, values):
        found.update(np.ascontiguousarray(cache).view(np.uint16).tobytes())
    return found.hexdigest()[:24]
