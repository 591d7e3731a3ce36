"""Sums in f32 whose order is written down: the same bits on every CPU, with any number of threads.

torch's and numpy's products leave the order to the BLAS and to the instruction set. Here a product of rows
has 64 running sums, element k along K in sum k mod 64, folded in halves at the end; products and sums are
separate operations. The loops below are plain Python, compiled by numba without permission to reassociate.
Sums along a last axis are numpy's, which adds in pairs of eight running sums everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

RUNNING = 64
_SHARED = 1 << 23  # products from which threads pay


def _multiply_bits(x: Any, w: Any, low: int, high: int, out: Any, first: int, last: int) -> None:
    """out[:, n] = x . w[n, low:high] for n from first to last; x[M, K/64, 64] f32, w[N, K'] bf16 bits."""
    bits = np.zeros(x.shape[1] * 64, np.uint32)
    row = bits.view(np.float32).reshape(x.shape[1], 64)
    sums = np.empty(64, np.float32)
    for n in range(first, last):
        for k in range(high - low):
            bits[k] = np.uint32(w[n, low + k]) << np.uint32(16)
        for m in range(x.shape[0]):
            for j in range(64):
                sums[j] = np.float32(0)
            for k in range(x.shape[1]):
                for j in range(64):
                    sums[j] += row[k, j] * x[m, k, j]
            half = 32
            while half:
                for j in range(half):
                    sums[j] += sums[half + j]
                half //= 2
            out[m, n] = sums[0]


def _multiply_batch(x: Any, w: Any, out: Any) -> None:
    """out[b, m, n] = x[b, m] . w[b, n]; both [B, rows, K/64, 64] f32."""
    sums = np.empty(64, np.float32)
    for b in range(x.shape[0]):
        for m in range(x.shape[1]):
            for n in range(w.shape[1]):
                for j in range(64):
                    sums[j] = np.float32(0)
                for k in range(x.shape[2]):
                    for j in range(64):
                        sums[j] += w[b, n, k, j] * x[b, m, k, j]
                half = 32
                while half:
                    for j in range(half):
                        sums[j] += sums[half + j]
                    half //= 2
                out[b, m, n] = sums[0]


def _exponential(x: Any, out: Any) -> None:
    """exp of f64 x <= 0, by its series after a halving of the range; zero below -700, NaN of NaN."""
    for i in range(x.size):
        value = x[i]
        if not value >= -700.0:
            out[i] = value if np.isnan(value) else 0.0
            continue
        n = np.rint(value * 1.4426950408889634)
        r = (value - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10
        total = 1.0
        for term in range(14, 0, -1):
            total = 1.0 + total * r / term
        whole = np.int64(n)
        while whole < -60:
            total *= 8.673617379884035e-19  # 2**-60, exact
            whole += 60
        out[i] = total / np.float64(np.int64(1) << -whole)


@lru_cache(maxsize=8)
def _compiled(loops: Callable[..., None]) -> Callable[..., None]:
    """Machine code of ``loops``, kept in the project's cache where that can be written."""
    import numba

    from llms.checkpoints import cache_root

    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_root() / "numba")
    try:
        made: Callable[..., None] = numba.njit(nogil=True, cache=True)(loops)
    except RuntimeError:  # there is no place to write to
        made = numba.njit(nogil=True)(loops)
    finally:
        numba.config.CACHE_DIR = before
    return made


def _in_rows(x: Any) -> Any:
    """f32 ``[..., K]`` as contiguous ``[..., ceil(K / 64), 64]``, zeros behind."""
    wide = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % RUNNING)).contiguous()
    return wide.view(*x.shape[:-1], -1, RUNNING).numpy()


def products(x: Any, weight: Any, low: int = 0, high: int | None = None) -> Any:
    """f32 ``[M, N]``: ``x[M, K]`` times bf16 ``weight[N, K']``, of which columns ``low`` to ``high`` count.

    Raises:
        TypeError: the weight is not bf16.
    """
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"a weight is bf16 as the checkpoint has it, not {weight.dtype}")
    high = weight.shape[1] if high is None else min(high, weight.shape[1])
    bits = weight.contiguous().view(torch.int16).numpy().view(np.uint16)
    rows = _in_rows(x)
    N = weight.shape[0]
    out = np.empty((x.shape[0], N), np.float32)
    run = _compiled(_multiply_bits)
    count = torch.get_num_threads() if x.numel() * N >= _SHARED else 1
    if count == 1:
        run(rows, bits, low, high, out, 0, N)
        return torch.from_numpy(out)
    bounds = [N * i // count for i in range(count + 1)]
    with ThreadPoolExecutor(count) as pool:
        parts = [
            pool.submit(run, rows, bits, low, high, out, first, last) for first, last in pairwise(bounds)
        ]
        for part in parts:
            part.result()
    return torch.from_numpy(out)


def batched(x: Any, w: Any) -> Any:
    """f32 ``[B, M, N]``: rows of ``x[B, M, K]`` times rows of ``w[B, N, K]``."""
    out = np.empty((*x.shape[:2], w.shape[1]), np.float32)
    _compiled(_multiply_batch)(_in_rows(x), _in_rows(w), out)
    return torch.from_numpy(out)


def last_axis(x: Any) -> Any:
    """f32 sum along the last axis."""
    return torch.from_numpy(np.add.reduce(x.float().contiguous().numpy(), axis=-1))


def exponential(x: Any) -> Any:
    """exp(x) for x <= 0, computed in f64 and rounded to f32."""
    wide = x.double().contiguous().numpy().reshape(-1)
    out = np.empty_like(wide)
    _compiled(_exponential)(wide, out)
    return torch.from_numpy(out.astype(np.float32).reshape(x.shape))
