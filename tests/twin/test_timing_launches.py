"""Times of launches, programs, transfers and host work: shapes of the curves, not values of the model."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from npu_twin import timing
from npu_twin.ops.gemv import largest_divisor
from npu_twin.opset import Config
from npu_twin.timing import parameters
from npu_twin.timing.tiling import attention, gemm, gemv

GEMM = gemm(2048, 2048, 2048)
LAUNCHES = [
    GEMM,
    gemm(256, 576, 576),
    gemm(2048, 2048, 11008),
    gemv(2048, 2048),
    Config("gemv_add", "cascade", {"M": 2048, "K": 8192}, {"tile_m": 8}),
    Config("norm_gateup_swiglu", "cascade", {"emb": 2048, "hidden": 8192}, {"tile_m": 8}),
    Config("rms_norm", "weighted", {"M": 2048, "N": 1024}),
    Config("rms_norm", "weighted", {"M": 1, "N": 1024}, herd=(1, 1)),
    Config("layer_norm", "affine", {"M": 1024, "N": 768}),
    Config("rope", "half_split", {"rows": 16384, "head_dim": 64}),
    attention(512, 512, 64, 12, 6, causal=True),
    attention(512, 512, 128, 32, 8, causal=True),
    Config("eltwise_add", "", {"n": 4194304}),
    Config("bias_add", "", {"rows": 1024, "n": 768}),
    Config("silu_mul", "", {"n": 4194304}),
    Config("gelu", "", {"n": 4194304}, herd=(8, 2)),
]


@dataclass
class Listing:
    launches: list[SimpleNamespace] = field(default_factory=list)


def named(call, name):
    return SimpleNamespace(
        name=name,
        op=call.op,
        method=call.method,
        dims=call.dims,
        tile=call.tile,
        herd=call.herd,
        attrs=call.attrs,
    )


def with_dims(call, **dims):
    return Config(call.op, call.method, {**call.dims, **dims}, call.tile, call.herd, call.attrs)


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda c: f"{c.op}-{'x'.join(map(str, c.dims.values()))}")
def test_every_operation_takes_a_plausible_time(launch):
    us = timing.launch_us(launch)
    assert 5.0 < us < 100_000.0
    assert timing.standalone_us(launch) > 40.0


@pytest.mark.parametrize(
    ("launch", "grown"),
    [
        (GEMM, {"M": 4096}),
        (GEMM, {"K": 4096}),
        (GEMM, {"N": 4096}),
        (LAUNCHES[3], {"M": 4096}),
        (LAUNCHES[3], {"K": 4096}),
        (LAUNCHES[6], {"M": 4096}),
        (LAUNCHES[6], {"N": 2560}),
        (LAUNCHES[8], {"M": 2048}),
        (LAUNCHES[9], {"rows": 32768}),
        (LAUNCHES[9], {"head_dim": 128}),
        (LAUNCHES[10], {"lq": 1024}),
        (LAUNCHES[10], {"lk": 1024}),
        (LAUNCHES[10], {"q_heads": 24}),
        (LAUNCHES[12], {"n": 8388608}),
        (LAUNCHES[13], {"rows": 2048}),
        (LAUNCHES[14], {"n": 8388608}),
        (LAUNCHES[15], {"n": 8388608}),
    ],
)
def test_more_work_takes_longer_but_not_more_than_in_proportion(launch, grown):
    (name, value) = next(iter(grown.items()))
    share = value / launch.dims[name]
    small, large = timing.launch_us(launch), timing.launch_us(with_dims(launch, **grown))
    assert small < large < small * share * 1.05


def test_a_gemm_reads_less_with_a_wider_tile():
    narrow = {**GEMM.tile, "tile_n": 32}
    slow = Config("gemm", "external", GEMM.dims, narrow, GEMM.herd)
    fast = Config("gemm", "external", GEMM.dims, GEMM.tile, GEMM.herd)
    assert timing.standalone_us(slow) > 1.3 * timing.standalone_us(fast)


def test_the_fused_cast_pays_for_its_second_launch():
    fused, plain = (Config("gemm", m, GEMM.dims, GEMM.tile, GEMM.herd) for m in ("fused-cast", "external"))
    extra = timing.standalone_us(fused) - timing.standalone_us(plain)
    cast_of_four_million = 4.2e6 * 6 / 200e3  # 6 bytes an element at a rate no part of the device reaches
    assert extra > cast_of_four_million


def test_half_the_array_takes_about_twice_as_long_for_a_norm():
    whole, half = (Config("rms_norm", "weighted", {"M": 4096, "N": 1024}, {}, (h, 1)) for h in (8, 4))
    assert 1.7 < timing.standalone_us(half) / timing.standalone_us(whole) < 2.05


def test_odd_descriptor_groups_are_slower():
    """1187 is prime: the runtime cannot group the launches, so the pipe refills after each one."""
    even, odd = gemv(8 * 16 * 1184, 896), gemv(8 * 16 * 1187, 896)
    assert timing.standalone_us(odd) > 1.5 * timing.standalone_us(even)


def test_a_program_is_its_launches_and_a_start():
    listing = Listing([named(GEMM, "q"), named(LAUNCHES[9], "rope")])
    found = timing.run_us(listing)
    assert [name for name, _ in found.launches] == ["q", "rope"]
    assert found.total_us == pytest.approx(found.overhead_us + sum(us for _, us in found.launches))
    ratio = parameters.current()["model.program_ratio"]
    assert found.launches[0][1] == pytest.approx(ratio * timing.launch_us(GEMM))
    assert found.overhead_us > 0


def test_run_times_are_computed_once_per_listing():
    listing = Listing([named(GEMM, f"g{i}") for i in range(8)])
    first = timing.run_us(listing)
    start = time.perf_counter()
    for _ in range(1000):
        assert timing.run_us(listing) is first
    assert time.perf_counter() - start < 0.1
    other = Listing([named(GEMM, "only")])
    assert timing.run_us(other).total_us < first.total_us


def test_transfers_grow_with_size_and_writing_is_slower():
    assert 0 < timing.sync_us(0, True) < timing.sync_us(1 << 20, True) < timing.sync_us(1 << 24, True)
    assert timing.sync_us(1 << 24, False) < timing.sync_us(1 << 24, True)


def test_the_device_sleeps_after_ten_seconds():
    assert timing.wake_us(5.0) == timing.wake_us(10.0) == 0.0
    assert timing.wake_us(10.5) == pytest.approx(150_000.0)


def test_host_operations():
    for name in (
        "tokenize",
        "embed_lookup",
        "kv_cache_extract",
        "final_rms_norm",
        "decode_attention_cpu",
        "other",
    ):
        assert timing.host_op_us(name, nbytes=4096, flops=1000) > 0
    assert timing.host_op_us("embed_lookup", 1 << 24) > 10 * timing.host_op_us("embed_lookup", 1 << 20)
    short, long = (timing.host_op_us("decode_attention_cpu", n) for n in (1 << 18, 1 << 26))
    assert long > 3 * short
    assert timing.dispatch_us() > 0
    assert timing.context_switch_us() > timing.dispatch_us()


def test_an_unknown_operation_is_named():
    with pytest.raises(ValueError, match="conv2d"):
        timing.launch_us(Config("conv2d", "", {}))


def test_a_tile_that_is_missing_is_named():
    with pytest.raises(KeyError, match="tile_m"):
        timing.launch_us(Config("gemm", "drain", {"M": 256, "K": 256, "N": 256}, {}, (8, 4)))


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from npu_twin import timing\n"
        "timing.predict(timing.ModelSizes(30, 576, 9, 3, 64, 1536, 49152))\n"
        "heavy = ('scipy', 'torch', 'llvmlite', 'matplotlib', 'kernel_registry', 'llms')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_parameters_are_few_and_each_is_explained():
    assert len(parameters.DEFINITIONS) <= 60
    assert len({p.name for p in parameters.DEFINITIONS}) == len(parameters.DEFINITIONS)
    for parameter in parameters.DEFINITIONS:
        assert parameter.unit
        assert len(parameter.meaning) > 15
        assert parameter.provenance
        assert parameters.current()[parameter.name] > 0


def test_a_broken_parameter_file_is_named(tmp_path):
    path = tmp_path / "timing_parameters.json"
    path.write_text('{"parameters": [{"name": "gemm.ddr_gbps"}]}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"timing_parameters\.json.*tools\.twin_calibration"):
        parameters.read_file(path)


def test_largest_divisor():
    assert [largest_divisor(n, 4) for n in (1, 7, 38, 70, 128, 9)] == [1, 1, 2, 2, 4, 3]
