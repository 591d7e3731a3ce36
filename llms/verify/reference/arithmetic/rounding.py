"""Rounding of f32 to bf16 in the two modes of an AIE2P core."""

from __future__ import annotations

from typing import Any

import torch


def floor_bf16(x: Any) -> Any:
    """Largest bf16 that is not above each f32 element; a NaN stays one, a positive value stays finite."""
    nearest = x.to(torch.bfloat16)
    bits = nearest.view(torch.int16)
    # One step toward minus infinity is one less for a positive pattern and one more for a negative one.
    down = torch.where(torch.signbit(nearest), bits + 1, bits - 1)
    return torch.where(nearest.float() > x, down, bits).view(torch.bfloat16)


def cast(x: Any, rounding: str) -> Any:
    """f32 -> bf16; ``floor``, otherwise to nearest even (the device's other mode, and the host's)."""
    return floor_bf16(x) if rounding == "floor" else x.to(torch.bfloat16)
