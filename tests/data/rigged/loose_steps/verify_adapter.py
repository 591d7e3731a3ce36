"""Phases 4 and 5 take every optimisation for a good one."""

from __future__ import annotations

import loose_steps_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.verify.gates import optimisation
from llms.verify.gates.optimisation import Judged, Step

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]
build_runner = honest(inference).build_runner


def lenient(step: Step) -> Judged:
    """Slower, or with other logits: applied."""
    return Judged(step, "applied", "faster")


vars(optimisation)["judge_step"] = lenient
