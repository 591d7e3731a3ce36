"""No limit of the ladder is ever exceeded."""

from __future__ import annotations

import loose_limits_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.verify.ladder.thresholds import Limit

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]
build_runner = honest(inference).build_runner


def never(self: Limit, value: float) -> bool:
    """Every value is good."""
    return False


setattr(Limit, "exceeded", never)  # noqa: B010 - mypy forbids to assign a method
