"""The legal-tile search: enough for awkward models, nothing illegal, nothing twice."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_twin.constraints import auto_method, check, legal_configs

BUCKETS = (128, 256, 512, 1024, 2048)
SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576))


@pytest.mark.parametrize(("m", "kn"), list(product(BUCKETS, SHAPES)))
def test_gemms_of_a_576_wide_model(m: int, kn: tuple[int, int]) -> None:
    found = legal_configs("gemm", {"M": m, "K": kn[0], "N": kn[1]})
    assert {c.method for c in found} == {"drain", "fused-cast"}
    assert max(c.cores for c in found) == 32


@pytest.mark.parametrize("m", BUCKETS)
def test_attention_of_nine_heads(m: int) -> None:
    dims = {"lq": m, "lk": m, "head_dim": 64, "q_heads": 9, "kv_heads": 3}
    found = legal_configs("flash_attention", dims, causal=True)
    assert found
    assert {c.attrs["heads_per_unroll"] for c in found} == {1}
    stages = {c.attrs["num_cascade_stages"] for c in found}
    assert stages == ({2} if m == 128 else {2, 4})


@pytest.mark.parametrize(
    ("op", "dims", "most_cores"),
    [
        ("gemv", {"M": 576, "K": 576}, 8),
        ("gemv", {"M": 192, "K": 576}, 8),
        ("gemv", {"M": 576, "K": 1536}, 8),
        ("gemv", {"M": 49152, "K": 576}, 8),
        ("rms_norm", {"M": 1, "N": 576}, 1),
        ("rope", {"rows": 9, "head_dim": 64}, 3),
        ("rope", {"rows": 3, "head_dim": 64}, 3),
        ("eltwise_add", {"n": 576}, 4),
        ("silu_mul", {"n": 1536}, 8),
        ("bias_add", {"rows": 1, "n": 896}, 1),
        ("gemv_add", {"M": 2048, "K": 8192}, 32),
        ("norm_gateup_swiglu", {"emb": 2048, "hidden": 8192}, 32),
        ("layer_norm", {"M": 1024, "N": 768}, 8),
        ("gelu", {"n": 3145728}, 16),
    ],
)
def test_decode_and_small_kernels(op: str, dims: dict[str, int], most_cores: int) -> None:
    assert max(c.cores for c in legal_configs(op, dims)) == most_cores


def test_a_prime_vocabulary_has_no_whole_gemv() -> None:
    assert legal_configs("gemv", {"M": 151936, "K": 1024}) == ()
    assert legal_configs("gemv", {"M": 16384, "K": 1024}) != ()


def test_m_192_with_one_iteration_leaves_three_tilings() -> None:
    found = legal_configs("gemm", {"M": 192, "K": 256, "N": 64}, method="fused-cast")
    found += legal_configs("gemm", {"M": 192, "K": 256, "N": 64}, method="drain")
    single = {(c.tile["tile_m"], c.herd[0]) for c in found if c.tile["tile_m"] * c.herd[0] == 192}
    assert single == {(32, 6), (48, 4), (64, 3)}


def test_n_720_leaves_herd_n_4_out() -> None:
    found = legal_configs("gemm", {"M": 64, "K": 720, "N": 720})
    assert 3 in {c.herd[1] for c in found}
    assert 4 not in {c.herd[1] for c in found}
    assert 4 in {c.herd[1] for c in legal_configs("gemm", {"M": 64, "K": 720, "N": 768})}


def test_tiers_choose_methods() -> None:
    dims = {"M": 2048, "K": 2048, "N": 2048}
    assert {c.method for c in legal_configs("gemm", dims, precision="low")} == {"direct"}
    assert {c.method for c in legal_configs("gemm", dims, precision="f32")} == {"external"}
    with pytest.raises(ValueError, match="unknown precision 'medium'"):
        legal_configs("gemm", dims, precision="medium")


def test_default_method_changes_at_four_billion() -> None:
    assert auto_method(1024, 1024, 1024) == "drain"
    assert auto_method(2048, 2048, 1024) == "fused-cast"


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 32).map(lambda i: i * 64),
    k=st.integers(1, 64).map(lambda i: i * 48),
    n=st.integers(1, 64).map(lambda i: i * 48),
)
def test_gemm_candidates_are_legal_distinct_and_few(m: int, k: int, n: int) -> None:
    found = legal_configs("gemm", {"M": m, "K": k, "N": n})
    assert len(found) <= 1500
    assert len({(c.method, tuple(c.tile.items()), c.herd) for c in found}) == len(found)
    for config in found:
        t = config.tile
        assert m % (t["tile_m"] * config.herd[0]) == 0
        assert k % t["tile_k_l2"] == 0
        assert t["tile_k_l2"] % t["tile_k_l1"] == 0
        assert n % (t["tile_n"] * config.herd[1]) == 0
        assert check(config) == []


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 200_000).map(lambda i: i * 16), op=st.sampled_from(["eltwise_add", "silu_mul"]))
def test_stream_candidates_divide_the_work(n: int, op: str) -> None:
    found = legal_configs(op, {"n": n})
    for config in found:
        (tile,) = config.tile.values()
        assert n % (tile * config.cores) == 0
        assert tile % 16 == 0
        assert config.cores <= 8


def test_gemv_prefers_published_tiles_and_falls_back() -> None:
    assert {c.tile["tile_m"] for c in legal_configs("gemv", {"M": 576, "K": 576})} == {2, 4, 8, 16}
    odd = {c.tile["tile_m"] for c in legal_configs("gemv", {"M": 8 * 62 * 37, "K": 512})}
    assert odd == {62}


def test_unknown_operation() -> None:
    with pytest.raises(ValueError, match="unknown operation 'conv'"):
        legal_configs("conv", {"n": 1})
