"""bf16 rounding and the block format against independent scalar implementations (property tests)."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ml_dtypes import bfloat16

from npu_twin import bf16
from npu_twin.datapath import Arithmetic
from npu_twin.datapath._steps import as_bf16, round_into, upper
from npu_twin.datapath.blockfloat import quantise_, quantised_columns

# A first call imports or allocates; time limits per example would only measure the load of the machine.
unhurried = settings(deadline=None)

ANY_BITS = hnp.arrays(np.uint32, hnp.array_shapes(max_dims=1, max_side=64))


def as_f32(bits):
    return bits.view(np.float32)


@unhurried
@given(ANY_BITS)
def test_nearest_even_equals_ml_dtypes(bits):
    x = as_f32(bits)
    with np.errstate(all="ignore"):
        expected = x.astype(bfloat16)
    got = bf16.nearest_even(x).view(bfloat16)
    nan = np.isnan(x)
    assert np.array_equal(got[~nan].view(np.uint16), expected[~nan].view(np.uint16))
    assert np.all(np.isnan(got[nan].astype(np.float32)))


@unhurried
@given(ANY_BITS)
def test_floor_is_the_largest_bf16_not_above(bits):
    x = as_f32(bits)
    got = bf16.floor(x)
    value = bf16.widen(got).astype(np.float64)
    for v, f, b in zip(x.astype(np.float64), value, got, strict=True):
        if math.isnan(v):
            assert math.isnan(f)
            continue
        assert f <= v
        if f != v:
            # The next bf16 toward plus infinity, in terms of its bits; minus infinity counts as a value.
            following = int(b) - 1 if b & 0x8000 else int(b) + 1
            assert following == 0x7F80 or scalar(following) > v


def scalar(bits):
    return struct.unpack("<f", struct.pack("<I", (bits & 0xFFFF) << 16))[0]


@unhurried
@given(hnp.arrays(np.uint16, 8))
def test_widen_is_exact(bits):
    assert np.array_equal(bf16.widen(bits).view(np.uint32), bits.astype(np.uint32) << 16)


def test_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match=r"toward_zero.*floor, nearest_even"):
        bf16.to_bits([1.0], "toward_zero")


@unhurried
@given(
    hnp.arrays(np.float32, (3, 7), elements=st.floats(width=32, allow_nan=False)),
    st.sampled_from(["floor", "nearest_even"]),
)
def test_in_place_store_equals_the_plain_conversion(x, rounding):
    target = np.zeros(x.shape, np.uint16)
    wide = np.zeros(x.shape, np.float32)
    round_into(x.copy(), target, rounding)()
    kept = x.copy()
    round_into(kept, upper(wide), rounding, keep=True)()
    assert np.array_equal(kept, x)
    assert np.array_equal(target, bf16.to_bits(x, rounding))
    assert np.array_equal(wide.view(np.uint32), bf16.widen(target).view(np.uint32))


def scalar_block(values, bits, overflow):
    """Eight bf16 values in block floating point, element by element in Python floats."""
    largest = max(abs(v) for v in values)
    if largest == 0:
        return list(values)
    exponent = max(math.frexp(largest)[1] - 1, -127)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    while True:
        step = 2.0 ** (exponent - (bits - 2))
        mantissas = [round(v / step) for v in values]
        if all(low <= m <= high for m in mantissas):
            return [m * step for m in mantissas]
        if overflow == "saturate":
            return [min(max(m, low), high) * step for m in mantissas]
        exponent += 1


def bf16_values(low, high):
    """bf16 numbers whose exponent field lies in low..high, mantissas weighted towards all ones."""
    mantissa = st.one_of(st.integers(0, 127), st.integers(120, 127))
    return st.builds(
        lambda sign, e, m: scalar(sign << 15 | e << 7 | m),
        st.integers(0, 1),
        st.integers(low, high),
        mantissa,
    )


def block_strategy():
    near = st.lists(bf16_values(124, 130), min_size=8, max_size=8)
    far = st.lists(bf16_values(1, 253), min_size=8, max_size=8)
    huge = st.lists(bf16_values(245, 253), min_size=8, max_size=8)
    zeros = st.lists(st.one_of(st.just(0.0), st.just(-0.0), bf16_values(126, 128)), min_size=8, max_size=8)
    return st.one_of(near, far, huge, zeros)


@settings(max_examples=400, deadline=None)
@given(block_strategy(), block_strategy(), st.sampled_from([7, 8, 9]), st.sampled_from(["raise", "saturate"]))
def test_block_quantiser_equals_the_scalar_one(first, second, bits, overflow):
    column = np.array([first + second], np.float32).T
    x = torch.from_numpy(np.repeat(column, 3, axis=1))
    quantise_(x, Arithmetic(block_bits=bits, block_overflow=overflow))
    expected = scalar_block(first, bits, overflow) + scalar_block(second, bits, overflow)
    assert np.array_equal(x.numpy(), np.repeat(np.array([expected], np.float32).T, 3, axis=1))


@unhurried
@given(st.lists(bf16_values(100, 130).map(abs), min_size=8, max_size=8))
def test_positive_shortcut_equals_the_general_path(values):
    general = torch.tensor(values).reshape(8, 1)
    short = general.clone()
    quantise_(general, Arithmetic())
    quantise_(short, Arithmetic(), positive=True)
    assert torch.equal(general, short)


def test_raised_exponent_and_saturation_differ_where_they_must():
    """127.5 steps round to 128, which does not exist: the exponent goes up, or the value down to 127."""
    block = torch.tensor([255 / 128, 0.51, 0, 0, 0, 0, 0, 0], dtype=torch.float32).bfloat16().float()
    raised, saturated = block.reshape(8, 1).clone(), block.reshape(8, 1).clone()
    quantise_(raised, Arithmetic())
    quantise_(saturated, Arithmetic(block_overflow="saturate"))
    assert float(raised[0]) == 2.0
    assert float(saturated[0]) == 127 / 64
    negative = -block.reshape(8, 1)
    quantise_(negative, Arithmetic())
    assert float(negative[0]) == -2.0


def test_not_a_number_stays_and_infinity_spoils_its_block():
    x = torch.ones(16, 2)
    x[3, 0], x[9, 1] = float("nan"), float("inf")
    quantise_(x, Arithmetic())
    assert torch.isnan(x[3, 0])
    assert torch.isnan(x[8:, 1]).all()
    assert torch.equal(x[:8, 1], torch.ones(8))


@unhurried
@given(hnp.arrays(np.uint16, (16, 5), elements=st.integers(0, 0x7E7F)))
def test_quantised_weight_is_exactly_bf16(bits):
    weight = as_bf16(quantised_columns(bits, Arithmetic()))
    expected = torch.from_numpy(bf16.widen(bits))
    quantise_(expected, Arithmetic())
    assert torch.equal(weight.float(), expected)
