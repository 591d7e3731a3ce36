"""Buffer reuse: same results, fewer transfers, and no value that is not what it seems."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llms.llama_kernel_builder import driver
from llms.llama_kernel_builder.cache import KernelCache
from llms.llama_kernel_builder.exceptions import BadArgument
from llms.llama_kernel_builder.program import Buffer, Program, leaf_program
from llms.llama_kernel_builder.resident import OnDevice, ResidentCache
from llms.llama_kernel_builder.specs import KernelSpec
from llms.llama_kernel_builder.stitch import Part, stitch

N = 1024


def program(name: str) -> Program:
    """out = a + b."""
    leaf = leaf_program("add", KernelSpec.make("eltwise_add", {"n": N}, "default", {"tile": 128}, (8, 1)))
    buffers = [Buffer("a", (N,)), Buffer("b", (N,)), Buffer("out", (N,), role="output")]
    return stitch(name, buffers, [Part("add", leaf, {"a": "a", "b": "b", "out": "out"})])


def vector(start: float) -> Any:
    return (np.arange(N) % 16 + start).astype(bfloat16)


def numbers(values: Any) -> Any:
    return np.asarray(values).astype(np.float32)


def made(kind: type[KernelCache], folder: Path) -> Any:
    cache = kind(folder, driver=driver.select("twin"), shared_nonstatic=True)
    for name in ("first", "second"):
        cache.compile_and_cache(program(name))
    cache.profiler.enabled = True
    return cache


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ResidentCache]:
    opened = made(ResidentCache, tmp_path)
    yield opened
    opened.close()


def transfers(cache: KernelCache) -> dict[str, int]:
    found = {"bo_write": 0, "bo_read": 0}
    for (_, kind, _), entry in cache.profiler.entries.items():
        if kind in found:
            found[kind] += entry.calls
    return found


def chain(cache: KernelCache) -> Any:
    """((x + 1) + 2) + 4 over three kernel calls, the last two by one kernel on its own output."""
    out = cache.run("first", "k", a=vector(0), b=vector(1))["out"]
    out = cache.run("second", "k", a=out, b=vector(2))["out"]
    return cache.run("second", "k", a=out, b=vector(4))["out"]


def test_same_values_with_fewer_transfers(cache: ResidentCache, tmp_path: Path) -> None:
    plain = made(KernelCache, tmp_path)
    expected = numbers(chain(plain))
    np.testing.assert_array_equal(expected, numbers(chain(cache)))
    assert transfers(plain) == {"bo_write": 6, "bo_read": 3}
    assert transfers(cache) == {"bo_write": 4, "bo_read": 1}
    for _ in range(3):  # buffers alternate, results do not
        np.testing.assert_array_equal(expected, numbers(chain(cache)))


def test_a_kernel_never_writes_the_buffer_it_reads(cache: ResidentCache) -> None:
    one: Any = cache.run("second", "k", a=vector(0), b=vector(1))["out"]
    two: Any = cache.run("second", "k", a=one, b=vector(0))["out"]
    assert two.bo is not one.bo
    np.testing.assert_array_equal(numbers(one), np.arange(N) % 16 * 2 + 1)


def test_values_that_were_overwritten_are_an_error(cache: ResidentCache) -> None:
    lost: Any = cache.run("first", "k", a=vector(0), b=vector(1))["out"]
    seen: Any = cache.run("second", "k", a=vector(0), b=vector(1))["out"]
    kept = np.asarray(seen).copy()
    cache.run("first", "k", a=vector(5), b=vector(1))
    cache.run("second", "k", a=vector(5), b=vector(1))
    with pytest.raises(BadArgument, match="output 'out' of kernel 'first' was overwritten by a later run"):
        lost.numpy()
    with pytest.raises(BadArgument, match="overwritten"):
        cache.run("second", "k", a=lost, b=vector(0))
    np.testing.assert_array_equal(seen, kept)  # read in time: a copy for ever
    out = cache.run("first", "k", a=seen, b=vector(0))["out"]
    np.testing.assert_array_equal(numbers(out), numbers(kept) + np.arange(N) % 16)


def test_a_changed_output_is_the_hosts_array(cache: ResidentCache) -> None:
    out: Any = cache.run("first", "k", a=vector(0), b=vector(0))["out"]
    out[0] = 8
    again = cache.run("second", "k", a=out, b=vector(0))["out"]
    assert numbers(again)[0] == 8


def test_an_output_looks_like_its_array(cache: ResidentCache) -> None:
    out: Any = cache.run("first", "k", a=vector(0), b=vector(0))["out"]
    assert isinstance(out, OnDevice)
    assert (out.shape, out.dtype, out.nbytes, len(out)) == ((N,), bfloat16, 2 * N, N)
    assert transfers(cache)["bo_read"] == 0
    assert out.reshape(2, -1).shape == (2, N // 2)
    assert numbers(out * np.float32(2))[1] == 4
    assert np.concatenate([out, out]).size == 2 * N
    assert transfers(cache)["bo_read"] == 1
    with pytest.raises(AttributeError):
        _ = out._nothing


def test_load_and_run_still_gives_copies(cache: ResidentCache) -> None:
    first = cache.load_and_run("first", vector(0), vector(0), None)[2]
    before = first.copy()
    cache.load_and_run("first", vector(9), vector(0), None)
    assert type(first) is np.ndarray
    np.testing.assert_array_equal(first, before)


def test_nothing_outlives_close(cache: ResidentCache) -> None:
    out: Any = cache.run("first", "k", a=vector(0), b=vector(0))["out"]
    cache.close()
    with pytest.raises(BadArgument, match="overwritten"):
        out.numpy()
