"""Every launch rule: one configuration that breaks it, and a legal neighbour that differs in as little as
possible. Configurations are spelled out; nothing here is computed by the code under test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from npu_twin.constraints import RULES, SWITCHES, Config, Violation, check, stops_compilation


def gemm(
    m: int, k: int, n: int, method: str, tile: tuple[int, int, int, int], herd: tuple[int, int], **attrs: Any
) -> Config:
    keys = ("tile_m", "tile_k_l2", "tile_k_l1", "tile_n")
    return Config("gemm", method, {"M": m, "K": k, "N": n}, dict(zip(keys, tile, strict=True)), herd, attrs)


def gemv(m: int, k: int, tile_m: int, m_input: int, herd_m: int = 8, **attrs: Any) -> Config:
    tile = {"tile_m": tile_m, "m_input": m_input}
    return Config("gemv", "external", {"M": m, "K": k}, tile, (herd_m, 1), attrs)


def gemv_add(m: int, k: int, tile_m: int = 8, **attrs: Any) -> Config:
    tile = {"tile_m": tile_m, "m_input": tile_m}
    return Config("gemv_add", "cascade", {"M": m, "K": k}, tile, (8, 4), attrs)


def attention(
    length: int = 2048,
    head_dim: int = 64,
    heads: tuple[int, int] = (32, 8),
    tile: tuple[int, int, int] = (256, 64, 4),
    hpu: int = 2,
    stages: int = 4,
    method: str = "seq_first",
    causal: bool = True,
    lk: int | None = None,
    dv_tile: int | None = None,
    **attrs: Any,
) -> Config:
    dims = {
        "lq": length,
        "lk": lk or length,
        "head_dim": head_dim,
        "q_heads": heads[0],
        "kv_heads": heads[1],
    }
    tiles = dict(zip(("lqp", "lkp", "num_q_tiles"), tile, strict=True))
    tiles["dv_tile"] = dv_tile or min(64, head_dim)
    full = {"causal": causal, "heads_per_unroll": hpu, "num_cascade_stages": stages, **attrs}
    return Config("flash_attention", method, dims, tiles, (hpu * tile[2], stages), full)


def stream(op: str, n: int, tile: int, herd: tuple[int, int] = (8, 1)) -> Config:
    return Config(op, "default", {"n": n}, {"tile" if op == "eltwise_add" else "tile_n": tile}, herd)


def rows(op: str, dims: Mapping[str, int], herd: tuple[int, int], **attrs: Any) -> Config:
    return Config(op, "weighted", dims, {}, herd, attrs)


G2048 = (2048, 2048, 2048)
WIDE = (64, 256, 32, 128)
HERD = (8, 4)
FUSED = gemm(*G2048, "fused-cast", WIDE, HERD)

CASES: list[tuple[str, str, Config, Config]] = [
    ("T1", "build", replace(FUSED, tile={"tile_m": 64}), FUSED),
    ("D1", "place", replace(FUSED, herd=(16, 4)), FUSED),
    ("D7", "compile", gemm(128, 576, 576, "drain", (32, 72, 36, 48), (4, 4)),
     gemm(128, 576, 576, "drain", (32, 192, 32, 48), (4, 4))),
    ("B13", "compile", replace(FUSED, attrs={"transpose": True}), FUSED),
    ("G1", "build", gemm(96, 2048, 2048, "drain", (32, 256, 32, 128), (2, 4)),
     gemm(128, 2048, 2048, "drain", (32, 256, 32, 128), (2, 4))),
    ("G2", "build", gemm(2048, 2048, 2048, "fused-cast", (64, 384, 32, 128), HERD), FUSED),
    ("G3", "build", gemm(2048, 2048, 896, "fused-cast", (64, 256, 32, 128), HERD),
     gemm(2048, 4864, 896, "fused-cast", (64, 256, 32, 32), HERD)),
    ("G4", "compile", gemm(64, 12288, 960, "drain", (16, 384, 32, 120), (4, 4)),
     gemm(64, 12288, 960, "drain", (16, 384, 32, 240), (4, 4))),
    ("G5", "runtime", gemm(2048, 896, 896, "drain", (32, 128, 32, 128), (8, 1)),
     gemm(2048, 896, 896, "drain", (32, 128, 32, 32), HERD)),
    ("G6", "build", gemm(1024, 1024, 1024, "fused-cast", (32, 256, 32, 128), HERD),
     gemm(1024, 1024, 1024, "fused-cast", (64, 256, 32, 128), HERD)),
    ("G7", "compile", gemm(*G2048, "drain", WIDE, HERD), gemm(*G2048, "drain", (32, 256, 32, 128), HERD)),
    ("G8", "compile", gemm(2048, 1024, 1024, "fused-cast", WIDE, HERD),
     gemm(2048, 1024, 2048, "fused-cast", WIDE, HERD)),
    ("G9", "compile", gemm(2048, 3584, 3584, "fused-cast", (64, 512, 32, 128), HERD),
     gemm(2048, 4096, 4096, "fused-cast", (64, 512, 32, 128), HERD)),
    ("G10", "silent", gemm(256, 960, 960, "drain", (32, 160, 32, 80), HERD),
     gemm(256, 960, 960, "drain", (32, 320, 32, 80), HERD)),
    ("G14", "silent", replace(FUSED, attrs={"object": {"tile_n": 64}}),
     replace(FUSED, attrs={"object": {"tile_n": 128}})),
    ("G19", "silent", replace(FUSED, attrs={"bf16_emulation": False}), FUSED),
    ("B7", "compile", gemm(2048, 4096, 9472, "fused-cast", (64, 128, 32, 64), (8, 4)),
     gemm(2048, 4096, 9472, "fused-cast", (64, 64, 32, 64), (8, 4))),
    ("B8", "compile", gemm(2048, 2048, 11008, "direct", (64, 256, 32, 64), HERD),
     gemm(2048, 2048, 11008, "direct", (64, 128, 32, 64), HERD)),
    ("B9", "compile", gemm(2048, 4096, 12288, "direct", (64, 256, 32, 64), HERD),
     gemm(2048, 4096, 12288, "direct", (64, 128, 32, 64), HERD)),
    ("B11", "compile", gemm(2048, 2048, 6144, "fused-cast", (64, 512, 32, 128), HERD),
     gemm(2048, 2048, 6144, "fused-cast", WIDE, HERD)),
    ("V1", "build", gemv(896, 480, 8, 8), gemv(896, 448, 8, 8)),
    ("V2", "build", gemv(896, 896, 16, 12), gemv(896, 896, 16, 16)),
    ("V3", "build", gemv(4096, 4096, 8, 2), gemv(4096, 4096, 4, 2)),
    ("V4", "compile", gemv(2048, 11008, 2, 2), gemv(2048, 11008, 2, 1)),
    ("V6", "hang", gemv(16384, 4096, 4, 2, herd_m=4), gemv(16384, 4096, 4, 4, herd_m=8)),
    ("V6", "hang", gemv(4096, 4096, 4, 4, herd_m=4), gemv(2048, 4096, 4, 4, herd_m=4)),
    ("V7", "silent", gemv(896, 896, 16, 16, object={"tile_m": 8}),
     gemv(896, 896, 16, 16, object={"tile_m": 16})),
    ("B2", "compile", gemv(2560, 2560, 8, 1), gemv(2560, 2560, 8, 2)),
    ("B3", "compile", gemv(151936, 1024, 16, 16), gemv(49152, 2048, 8, 8)),
    ("B4", "compile", gemv(16384, 1024, 16, 4), gemv(8192, 1024, 16, 4)),
    ("B12", "compile", gemv(1536, 8960, 1, 1), gemv(1536, 8960, 2, 2)),
    ("V9", "silent", gemv_add(896, 896), gemv_add(1024, 1024)),
    ("V10", "build", Config("norm_gateup_swiglu", "cascade", {"emb": 2560, "hidden": 9728}, {}, (8, 4)),
     Config("norm_gateup_swiglu", "cascade", {"emb": 2048, "hidden": 8192}, {}, (8, 4))),
    ("V10", "build", gemv_add(1024, 1024, n_cascade=5), gemv_add(1024, 1024, n_cascade=4)),
    ("B6", "compile", Config("norm_gateup_swiglu", "cascade", {"emb": 3072, "hidden": 8192}, {}, (8, 4)),
     Config("norm_gateup_swiglu", "cascade", {"emb": 1536, "hidden": 6144}, {}, (8, 3))),
    ("F1", "place", attention(tile=(512, 64, 8)), attention(tile=(512, 64, 8), hpu=1)),
    ("F2", "place", attention(stages=8), attention(stages=2)),
    ("F3", "build", attention(length=128, tile=(128, 64, 2), stages=4),
     attention(length=128, tile=(128, 64, 2), stages=2)),
    ("F4", "build", attention(length=512, lk=1024), attention(length=512, lk=1024, causal=False)),
    ("F5", "hang", attention(tile=(128, 32, 4), dv_tile=64), attention()),
    ("F5", "compile", attention(tile=(512, 64, 4), causal=False), attention(causal=False)),
    ("F5", "build", attention(tile=(256, 64, 3), causal=False), attention(causal=False)),
    ("F6", "build", attention(head_dim=96, method="head_first", dv_tile=64),
     attention(head_dim=128, method="head_first", dv_tile=64)),
    ("F7", "hang", attention(head_dim=128), attention(head_dim=128, method="head_first")),
    ("F10", "compile", attention(head_dim=256, tile=(256, 32, 8), hpu=1, method="head_first", dv_tile=256),
     attention(head_dim=256, tile=(256, 32, 8), hpu=1, method="head_first", dv_tile=128)),
    ("F11", "build", attention(heads=(9, 3)), attention(heads=(9, 3), hpu=1)),
    ("F12", "build", attention(window=100), attention(window=128)),
    ("F13", "hang", attention(omit_infinite_loop=True), attention(omit_infinite_loop=False)),
    ("F14", "hang", attention(object={"lkp": 256}), attention(object={"lkp": 64, "tile_q": 64})),
    ("F15", "compile", attention(head_dim=128, method="head_first", runtime_tiling=(4, 4)),
     attention(head_dim=128, method="head_first", runtime_tiling=(4, 4, 1))),
    ("F15", "compile", attention(head_dim=128, method="head_first", runtime_tiling=(4, 4)),
     attention(runtime_tiling=(4, 4))),
    ("S6", "place", attention(tile=(128, 64, 2), hpu=4), attention(tile=(128, 64, 2), hpu=2)),
    ("S1", "place", stream("eltwise_add", 4194304, 2048, (8, 2)),
     stream("eltwise_add", 4194304, 2048, (2, 4))),
    ("S1", "place", stream("silu_mul", 16777216, 4096, (4, 4)), stream("silu_mul", 16777216, 4096, (8, 1))),
    ("S2", "place", rows("rope", {"rows": 2048, "head_dim": 64}, (8, 2)),
     rows("rope", {"rows": 2048, "head_dim": 64}, (2, 4))),
    ("S3", "place", stream("gelu", 3145728, 4096, (8, 4)), stream("gelu", 3145728, 4096, (4, 4))),
    ("S4", "place", rows("rms_norm", {"M": 96, "N": 576}, (3, 1)),
     rows("rms_norm", {"M": 96, "N": 576}, (4, 1))),
    ("S5", "place", rows("layer_norm", {"M": 1024, "N": 768}, (4, 2)),
     rows("layer_norm", {"M": 1024, "N": 768}, (8, 1))),
    ("S7", "place", rows("bias_add", {"rows": 1024, "n": 768}, (8, 2)),
     rows("bias_add", {"rows": 1024, "n": 768}, (8, 1))),
    ("E1", "compile", stream("eltwise_add", 4194304, 8192), stream("eltwise_add", 4194304, 4096)),
    ("E1", "build", stream("eltwise_add", 576, 72), stream("eltwise_add", 576, 96, (6, 1))),
    ("E1", "compile", rows("bias_add", {"rows": 128, "n": 8192}, (8, 1)),
     rows("bias_add", {"rows": 128, "n": 3072}, (8, 1))),
    ("E1", "build", stream("eltwise_add", 73728, 2048), stream("eltwise_add", 73728, 3072)),
    ("E3", "build", stream("silu_mul", 196608, 5120), stream("silu_mul", 196608, 3072)),
    ("E4", "build", stream("gelu", 3145728, 5120, (8, 2)), stream("gelu", 3145728, 6144, (8, 2))),
    ("E2", "silent", stream("eltwise_add", 245760, 2048), stream("eltwise_add", 245760, 1024)),
    ("E3", "compile", stream("silu_mul", 16777216, 8192), stream("silu_mul", 16777216, 4096)),
    ("E4", "compile", stream("gelu", 3145728, 256, (8, 2)), stream("gelu", 3145728, 512, (8, 2))),
    ("E5", "build", rows("rms_norm", {"M": 100, "N": 576}, (8, 1)),
     rows("rms_norm", {"M": 104, "N": 576}, (8, 1))),
    ("E5", "build", rows("layer_norm", {"M": 1024, "N": 760}, (8, 1)),
     rows("layer_norm", {"M": 1024, "N": 768}, (8, 1))),
    ("E6", "build", rows("rope", {"rows": 9, "head_dim": 64}, (8, 1)),
     rows("rope", {"rows": 9, "head_dim": 64}, (3, 1))),
    ("E6", "build", rows("rope", {"rows": 64, "head_dim": 64}, (8, 1), rows_per_dma=2),
     rows("rope", {"rows": 64, "head_dim": 64}, (8, 1), rows_per_dma=1)),
    ("E6", "silent", rows("rope", {"rows": 64, "head_dim": 64}, (8, 1), rows_per_dma=4),
     rows("rope", {"rows": 64, "head_dim": 64}, (8, 1))),
    ("B10", "compile", stream("silu_mul", 16777216, 1024), stream("silu_mul", 16777216, 512)),
    ("B10", "compile", stream("silu_mul", 16777216, 4096, (4, 1)),
     stream("silu_mul", 16777216, 4096, (1, 1))),
    ("B16", "compile", stream("silu_mul", 2048 * 18944, 4736),
     stream("silu_mul", 1024 * 18944, 4736)),
]  # fmt: skip

SWITCHED: list[tuple[str, Config, Config]] = [
    ("G11", FUSED, gemm(512, 2048, 2048, "fused-cast", WIDE, HERD)),
    ("F20", attention(length=4096, head_dim=128, method="head_first"),
     attention(length=2048, head_dim=128, method="head_first")),
]  # fmt: skip


def named(violations: list[Violation]) -> list[str]:
    return [v.rule_id for v in violations]


@pytest.mark.parametrize(
    ("rule", "shows_as", "bad", "good"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)]
)
def test_rule_trips_and_its_legal_neighbour_passes(
    rule: str, shows_as: str, bad: Config, good: Config
) -> None:
    assert named(check(good)) == []
    hit = [v for v in check(bad) if v.rule_id == rule]
    assert hit, f"{rule} did not trip, got {named(check(bad))}"
    assert {v.shows_as for v in hit} == {shows_as}
    for violation in hit:
        assert violation.values
        assert violation.message
        for value in violation.values.values():
            assert value is not None
        text = str(violation)
        assert rule in text
        assert shows_as in text


@pytest.mark.parametrize(("rule", "bad", "good"), SWITCHED)
def test_contradicted_rules_are_off_unless_switched_on(rule: str, bad: Config, good: Config) -> None:
    assert rule in SWITCHES
    assert named(check(bad)) == []
    assert named(check(bad, [rule])) == [rule]
    assert named(check(good, [rule])) == []


def test_every_launch_rule_has_a_case() -> None:
    tested = {c[0] for c in CASES} | {c[0] for c in SWITCHED}
    wanted = {
        rule.id
        for rule in RULES.values()
        if rule.enforcement != "fact" and not {"program", "session"} & set(rule.ops)
    }
    assert wanted - tested == set()
    assert tested <= set(RULES)


def test_the_suggestion_of_a_violation_is_legal_and_near() -> None:
    violation = next(v for v in check(gemm(*G2048, "drain", WIDE, HERD)) if v.rule_id == "G7")
    assert violation.values["bytes"] == 73728
    assert violation.suggestion.startswith("this would fit: drain")
    assert "herd 8x4" in violation.suggestion


def test_a_hopeless_shape_says_so() -> None:
    suggestions = {v.suggestion for v in check(gemv(151936, 1024, 16, 16))}
    assert suggestions == {
        "no legal gemv configuration is known for M=151936, K=1024; pad or split the shape"
    }


def test_only_what_a_compiler_sees_stops_a_compilation() -> None:
    corrupt = check(gemm(256, 960, 960, "drain", (32, 160, 32, 80), HERD))
    assert named(corrupt) == ["G10"]
    assert stops_compilation(corrupt) == []
    assert stops_compilation(check(attention(omit_infinite_loop=True))) == []
    assert named(stops_compilation(check(stream("eltwise_add", 4194304, 8192)))) == ["E1"]


def test_unknown_operation_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown operation 'softmax'"):
        check(Config("softmax", "", {}, {}, (1, 1)))


@pytest.mark.parametrize(
    ("k", "n", "tile_k_l2", "method", "fits"),
    [
        (4096, 8192, 256, "drain", True),
        (4096, 4096, 512, "drain", True),
        (4096, 8192, 512, "drain", False),
        (3584, 18944, 64, "fused-cast", True),
        (3584, 18944, 64, "direct", False),
        (2560, 10240, 128, "fused-cast", True),
        (2560, 9728, 128, "fused-cast", False),
    ],
)
def test_stride_limit_follows_the_observed_table(
    k: int, n: int, tile_k_l2: int, method: str, fits: bool
) -> None:
    tile_m = 32 if method == "drain" else 64
    found = named(check(gemm(2048, k, n, method, (tile_m, tile_k_l2, 32, 64), HERD)))
    assert [f for f in found if f in ("B7", "B8")] == [] if fits else found != []
