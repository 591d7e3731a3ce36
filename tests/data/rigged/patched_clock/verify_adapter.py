"""The device clock runs at half speed: every time is half of what it was."""

from __future__ import annotations

import patched_clock_inference as inference
from rigged_base import DEFAULT_MODEL, MODEL_CHOICES, build_config, checkpoint, honest, resolve_model

from llms.llama_kernel_builder.driver import TwinClock

__all__ = ["DEFAULT_MODEL", "MODEL_CHOICES", "build_config", "build_runner", "checkpoint", "resolve_model"]
build_runner = honest(inference).build_runner

_real_now = TwinClock.now


def slow_now(self: TwinClock) -> float:
    """Half of the time that has passed."""
    return 0.6 * _real_now(self)


setattr(TwinClock, "now", slow_now)  # noqa: B010 - mypy forbids to assign a method
