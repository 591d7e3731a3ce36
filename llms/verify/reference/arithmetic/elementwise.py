"""Norms, rotary embedding, adds and the activation, with the roundings of float-only cores.

Every function takes bf16 and gives bf16. ``rounding`` is ``floor`` or ``nearest_even`` for a launch on the
device, ``host`` for the same in f32 with one cast and exact functions.
"""

from __future__ import annotations

from typing import Any

import torch

from llms.verify.reference.arithmetic import sums
from llms.verify.reference.arithmetic.rounding import cast

LANES = 16
TANH_GRID = 2.0**-4.25
"""Input grid of the surrogate for the tanh table, whose content is not public: one parameter, fitted on the
published error of SiLU-and-Mul (1.024e-2), checked on that of GELU (8.41e-3)."""


def rms_norm(x: Any, weight: Any, eps: float, rounding: str, width: int = 0) -> Any:
    """``x[..., N]`` times ``weight[N]`` over its root mean square, sum of squares in f32.

    On the device the reciprocal root, its product with x and the product with the weight each round.
    ``width``: length of a row that is padded with zeros. The mean is over that many then, so eps shrinks by
    N / width, and the bf16 weight is the model's times sqrt(N / width).
    """
    if rounding == "host":
        return final_norm(x, weight, eps)
    wide = x.float()
    whole = torch.nn.functional.pad(wide, (0, -wide.shape[-1] % LANES))
    lanes = (whole * whole).reshape(*whole.shape[:-1], -1, LANES).transpose(-2, -1)
    squares = sums.last_axis(sums.last_axis(lanes)).unsqueeze(-1)
    count = x.shape[-1]
    if width > count:
        eps *= count / width
        weight = (weight.float() * (count / width) ** 0.5).to(torch.bfloat16)
        count = width
    scale = 1.0 / torch.sqrt(squares / count + eps)
    scaled = cast(wide * cast(scale, rounding).float(), rounding)
    return cast(scaled.float() * weight.float(), rounding)


def final_norm(x: Any, weight: Any, eps: float) -> Any:
    """The norm in front of the LM head: on the host, f32 throughout, one cast."""
    wide = x.float()
    mean = sums.last_axis(wide * wide).unsqueeze(-1) / x.shape[-1]
    scale = 1.0 / torch.sqrt(mean + eps)
    return (wide * scale * weight.float()).to(torch.bfloat16)


def rope(x: Any, cos: Any, sin: Any, rounding: str) -> Any:
    """Rotate halves of ``x[..., d]``; ``cos`` and ``sin`` bf16 ``[..., d]``, both halves alike."""
    half = x.shape[-1] // 2
    low, high = x[..., :half].float(), x[..., half:].float()
    c, s = cos[..., :half].float(), sin[..., :half].float()
    turned = torch.cat((low * c - high * s, low * s + high * c), -1)
    return cast(turned, rounding)


def add(a: Any, b: Any, rounding: str) -> Any:
    """f32 sum, one cast."""
    return cast(a.float() + b.float(), rounding)


def multiply(a: Any, b: Any, rounding: str) -> Any:
    """Product (exact in f32), one cast."""
    return cast(a.float() * b.float(), rounding)


def silu(gate: Any, rounding: str) -> Any:
    """gate * sigmoid(gate) as SiLU-and-Mul forms it: (1 + tanh(g/2)) / 2, then times g; halving is exact."""
    wide = gate.float()
    if rounding == "host":
        exact = wide.double()
        return (exact / (1.0 + torch.exp(-exact))).float().to(torch.bfloat16)
    argument = torch.round(wide.double() / 2 / TANH_GRID) * TANH_GRID
    table = torch.tanh(argument).float().to(torch.bfloat16)
    sigmoid = cast(1.0 + table.float(), rounding).float() / 2
    return cast(wide * sigmoid, rounding)
