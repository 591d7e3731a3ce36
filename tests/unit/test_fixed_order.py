"""Products and attention whose order is stated, against float64 and an emulation of that order."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from fixed_order.attention import attend
from fixed_order.machine import KernelIsaError, isa
from fixed_order.products import GROUP, LANES, Gemv, PackedProduct, gemm, groups, pack_columns, pack_rows
from npu_twin.bf16 import nearest_even, widen


def bits(seed: int, *shape: int) -> np.ndarray:
    return nearest_even(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def in_lanes(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The stated order by numpy: element k in running sum k mod 16, then halves."""
    product = np.pad(widen(w) * widen(x), ((0, 0), (0, -w.shape[1] % LANES)))
    sums = np.zeros((w.shape[0], LANES), np.float32)
    for at in range(0, product.shape[1], LANES):
        sums += product[:, at : at + LANES]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


@pytest.mark.parametrize(("M", "K"), [(1, 1), (5, 16), (37, 45), (64, 576), (333, 1000)])
def test_gemv_has_the_stated_order(M: int, K: int) -> None:
    w, x = bits(1, M, K), bits(2, K)
    total, rounded = np.zeros(M, np.float32), np.zeros(M, np.uint16)
    Gemv(w, x, total)()
    Gemv(w, x, rounded)()
    np.testing.assert_array_equal(total, in_lanes(w, x))
    np.testing.assert_array_equal(rounded, nearest_even(total))


def upward(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = np.zeros((a.shape[1], b.shape[1]), np.float32)
    for row, column in zip(widen(a), widen(b), strict=True):
        total += row[:, None] * column[None, :]
    return total


@pytest.mark.parametrize(("M", "K", "N"), [(1, 8, 1), (8, 8, 48), (13, 40, 50), (64, 576, 96), (9, 300, 193)])
def test_products_sum_upward(M: int, K: int, N: int) -> None:
    a, b = bits(3, K, M), bits(4, K, N)
    expected = upward(a, b)
    plain, packed = np.zeros((1, M, N), np.float32), np.zeros((M, N), np.float32)
    gemm(widen(a)[None], widen(b)[None], plain)
    left = np.empty((groups(M), K, GROUP), np.float32)
    pack_rows(widen(a), left)
    PackedProduct(left, pack_columns(b), packed)()
    np.testing.assert_array_equal(plain[0], expected)
    np.testing.assert_array_equal(packed, expected)


def test_another_order_is_another_result() -> None:
    w, x = bits(5, 512, 2048), bits(6, 2048)
    total = np.zeros(512, np.float32)
    Gemv(w, x, total)()
    assert (total != in_lanes(w[:, ::-1], x[::-1])).any(), "the order of a sum would not be seen"


@pytest.mark.parametrize(("heads", "kv", "length", "d"), [(4, 2, 17, 24), (9, 3, 100, 64), (6, 6, 33, 13)])
def test_attention_is_softmax(heads: int, kv: int, length: int, d: int) -> None:
    q, k, v = bits(7, 1, heads, d), bits(8, kv, length, d), bits(9, kv, length, d)
    out = np.zeros((1, heads, d), np.uint16)
    attend(q, k, v, out, keys=length)
    wide_k, wide_v = (np.repeat(widen(x).astype(np.float64), heads // kv, 0) for x in (k, v))
    score = np.einsum("hd,hld->hl", widen(q[0]).astype(np.float64), wide_k) / np.sqrt(d)
    weight = np.exp(score - score.max(1, keepdims=True))
    expected = np.einsum("hl,hld->hd", weight / weight.sum(1, keepdims=True), wide_v)
    assert np.abs(widen(out[0]) - expected).max() <= 2.0**-8 * np.abs(expected).max()
    near = np.abs(widen(out[0]) - expected) <= 0.51 * 2.0**-7 * np.abs(expected) + 1e-6
    assert near.all()


def test_causal_attention_sees_one_more_key_per_query() -> None:
    q, k, v = bits(10, 6, 2, 16), bits(11, 1, 6, 16), bits(12, 1, 6, 16)
    out, alone = np.zeros((6, 2, 16), np.uint16), np.zeros((1, 2, 16), np.uint16)
    attend(q, k, v, out, keys=1, causal=True)
    for row in range(6):
        attend(q[row : row + 1], k, v, alone, keys=row + 1)
        np.testing.assert_array_equal(out[row], alone[0])
    with pytest.raises(ValueError, match="but there are 6"):
        attend(q, k, v, out, keys=2, causal=True)


def test_not_a_number_shows() -> None:
    q, k, v = bits(13, 1, 2, 16), bits(14, 1, 5, 16), bits(15, 1, 5, 16)
    k[0, 3, 2] = 0x7FC0
    out = np.zeros((1, 2, 16), np.uint16)
    attend(q, k, v, out, keys=5)
    assert np.isnan(widen(out)).all()


def test_an_instruction_set_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_KERNEL_ISA", "avx4096")
    isa.cache_clear()
    try:
        with pytest.raises(KernelIsaError, match="NPU_KERNEL_ISA=avx4096"):
            isa()
    finally:
        isa.cache_clear()


def test_help_of_pytest_compiles_nothing() -> None:
    code = (
        "import sys, pytest; pytest.main(['--collect-only', '-q', 'llms/qwen2']); "
        "sys.exit(bool({'numba', 'llvmlite', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
