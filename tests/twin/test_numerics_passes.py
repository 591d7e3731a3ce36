"""Compiled element-wise passes on every bit pattern, on lengths with a rest, and in place, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from npu_twin.bf16 import ROUNDINGS, to_bits, widen
from npu_twin.datapath.passes import added, rms_normed, rotated, scaled_by_table
from npu_twin.datapath.tables import silu_table

both_modes = pytest.mark.parametrize("rounding", ROUNDINGS)


def patterns(seed, *shape):
    """Any bits: infinities, NaN, denormals and both zeros among them."""
    return np.random.default_rng(seed).integers(0, 1 << 16, shape, dtype=np.uint16)


def same(found, expected):
    """Same bits, where a NaN of any payload is as good as another."""
    nan = np.isnan(widen(expected))
    assert (np.isnan(widen(found)) == nan).all()
    np.testing.assert_array_equal(found[~nan], expected[~nan])


@both_modes
@pytest.mark.parametrize("n", [1, 15, 4097, 140_001])
def test_sum_and_table(n, rounding):
    a, b, out = patterns(1, n), patterns(2, n), np.zeros(n, np.uint16)
    table = silu_table(rounding, "hw")
    with np.errstate(all="ignore"):
        total, product = to_bits(widen(a) + widen(b), rounding), to_bits(table[a] * widen(b), rounding)
    added(a, b, out, rounding)()
    same(out, total)
    scaled_by_table(table, a, b, out, rounding)()
    same(out, product)
    added(a, b, a, rounding)()
    same(a, total)


@both_modes
def test_one_row_for_all_rows(rounding):
    a, row, out = patterns(3, 301, 120), patterns(4, 120), np.zeros((301, 120), np.uint16)
    with np.errstate(all="ignore"):
        expected = to_bits(widen(a) + widen(row), rounding)
    added(a, row, out, rounding)()
    same(out, expected)


@both_modes
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("half", [12, 32])
def test_rotation(half, split, rounding):
    x, angles = patterns(5, 777, 2 * half), patterns(6, 777, 2 * half)
    first, second = (np.s_[:, :half], np.s_[:, half:]) if split else (np.s_[:, ::2], np.s_[:, 1::2])
    expected = np.zeros_like(x)
    with np.errstate(all="ignore"):
        a, b = widen(x[first]), widen(x[second])
        cos, sin = widen(angles[:, :half]), widen(angles[:, half:])
        expected[first] = to_bits(a * cos - b * sin, rounding)
        expected[second] = to_bits(b * cos + a * sin, rounding)
    rotated(x, angles, x, split, rounding)()
    same(x, expected)


@both_modes
def test_norm(rounding):
    x, w = patterns(7, 900, 48), patterns(8, 48)
    x[:600] = to_bits(np.random.default_rng(9).standard_normal((600, 48)), rounding)
    with np.errstate(all="ignore"):
        wide = widen(x)
        lanes = np.zeros((900, 16), np.float32)
        for at in range(0, 48, 16):
            lanes += wide[:, at : at + 16] ** 2
        for half in (8, 4, 2, 1):
            lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        inverse = np.float32(1) / np.sqrt(lanes / np.float32(48) + np.float32(1e-5))
        normed = widen(to_bits(wide * widen(to_bits(inverse, rounding)), rounding))
        expected = to_bits(normed * widen(w), rounding)
    rms_normed(x, w, x, 1e-5, rounding)()
    same(x, expected)


def test_an_operand_with_gaps_is_refused():
    x = patterns(10, 64)
    with pytest.raises(ValueError, match="not contiguous"):
        added(x[::2], x[::2], np.zeros(32, np.uint16), "floor")
