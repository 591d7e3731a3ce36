"""Where a library's function is still used, its last digits decide no bit of a result.

Cosine, sine and hyperbolic tangent in float64 differ by a few units in the last place (4e-16) from library to
library and from CPU to CPU. They only enter tables that are rounded to bf16 at once, so they matter where a
value lies that near the middle between two bf16 numbers: nowhere, as measured here.
"""

from __future__ import annotations

import numpy as np
import pytest

from llms.llama_kernel_builder.rope_table import inverse_frequencies
from llms.verify.contract.deployment import Deployment
from npu_twin.datapath.tables import TANH_GRID, all_values

LIBRARY_ERROR = 4 * 2.0**-52
"""Relative: four units in the last place, the worst that a vector library promises."""


def distance_to_tie(values: np.ndarray) -> float:
    """Smallest relative distance of an f64 value from the middle between two neighbouring bf16 numbers."""
    values = np.abs(values[(values != 0.0) & (np.abs(values) < 1.0)])
    mantissa, _ = np.frexp(values)
    steps = mantissa * 256.0  # bf16 has eight significant bits: whole numbers from 128 to 255
    return float((np.abs(steps - np.floor(steps) - 0.5) / steps).min())


@pytest.mark.parametrize("model", ["smollm2_135m", "llama32_1b", "qwen2", "qwen3_0_6b"])
def test_rotary_tables(model: str) -> None:
    config = Deployment.from_folder(model).config()
    angles = np.arange(2048, dtype=np.float64)[:, None] * inverse_frequencies(config)[None, :]
    for function in (np.cos, np.sin):
        assert distance_to_tie(function(angles)) > 1000 * LIBRARY_ERROR


def test_tanh_table() -> None:
    with np.errstate(all="ignore"):
        x = all_values().astype(np.float64)
    grid = np.unique(np.rint(x[np.isfinite(x) & (np.abs(x) < 40)] / TANH_GRID) * TANH_GRID)
    inner = np.abs(np.tanh(grid[np.abs(grid) < 4]))
    assert distance_to_tie(inner) > 1000 * LIBRARY_ERROR
    assert (np.tanh(grid[np.abs(grid) >= 4]) ** 2 > 0.998).all(), "beyond, tanh is one of the last two steps"


def test_silu_of_the_host() -> None:
    """The matched reference's SiLU on the host, for every finite bf16 argument."""
    with np.errstate(all="ignore"):
        x = all_values().astype(np.float64)
        x = x[np.isfinite(x) & (np.abs(x) < 80) & (np.abs(x) > 2.0**-8)]
        value = x / (1.0 + np.exp(-x))
    mantissa, _ = np.frexp(np.abs(value))
    steps = mantissa * 256.0
    tie = np.abs(steps - np.floor(steps) - 0.5) / steps
    assert tie.min() > 100 * LIBRARY_ERROR
