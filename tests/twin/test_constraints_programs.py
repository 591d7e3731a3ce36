"""Rules that need a whole program to see: one listing that breaks each, and a legal neighbour."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from npu_twin.constraints import RULES, SWITCHES, check_listing, check_session
from npu_twin.listing import Argument, Launch, Listing, Operand


def listing(launches: list[Launch], name: str = "program", target: str = "npu2", **options: Any) -> Listing:
    """A program with one argument per operand name that the launches use, sized by its largest use."""
    sizes: dict[str, tuple[int, str]] = {}
    for launch in launches:
        for key, spec in launch.signature().items():
            operand = launch.operands[key]
            stop = operand.offset + _size(spec.shape)
            sizes[operand.arg] = (max(stop, sizes.get(operand.arg, (0, ""))[0]), spec.dtype)
    arguments = tuple(Argument(arg, (size,), dtype) for arg, (size, dtype) in sizes.items())
    return Listing(name, arguments, tuple(launches), options, target)


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def launch(
    op: str,
    dims: dict[str, int],
    name: str,
    tile: dict[str, int] | None = None,
    herd: tuple[int, int] = (8, 1),
    method: str = "default",
    attrs: dict[str, Any] | None = None,
    **where: tuple[str, int],
) -> Launch:
    """A launch whose operands are arguments of their own unless ``where`` gives (argument, offset)."""
    from npu_twin.ops import OPS

    signature = OPS[op].signature(dims, method, tile or {})
    operands = {
        key: Operand(*where.get(key, (f"{name}_{key}", 0)), shape=spec.shape)
        for key, spec in signature.items()
    }
    return Launch(name, op, dims, operands, method, attrs or {}, tile or {}, herd)


def gemm(
    name: str, method: str = "fused-cast", tile_n: int = 128, k: int = 2048, n: int = 2048, **more: Any
) -> Launch:
    tile_m = 32 if method == "drain" else 64
    tile = {"tile_m": tile_m, "tile_k_l2": 256, "tile_k_l1": 32, "tile_n": tile_n}
    return launch("gemm", {"M": 512, "K": k, "N": n}, name, tile, (8, 4), method, **more)


def gemv(name: str, m: int, k: int, tile_m: int = 2, m_input: int = 2, **attrs: Any) -> Launch:
    tile = {"tile_m": tile_m, "m_input": m_input}
    return launch("gemv", {"M": m, "K": k}, name, tile, (8, 1), "external", attrs)


def add(name: str, n: int = 4096, **where: tuple[str, int]) -> Launch:
    return launch("eltwise_add", {"n": n}, name, {"tile": 512}, (8, 1), **where)


def layer_norm(w: tuple[str, int], b: tuple[str, int]) -> Listing:
    return listing([launch("layer_norm", {"M": 64, "N": 768}, "ln", None, (8, 1), "affine", w=w, b=b)])


def rope(name: str, method: str) -> Launch:
    return launch("rope", {"rows": 64, "head_dim": 64}, name, None, (8, 1), method, {"symbol": "rope_core"})


def attention() -> Launch:
    dims = {"lq": 512, "lk": 512, "head_dim": 64, "q_heads": 8, "kv_heads": 2}
    tile = {"lqp": 256, "lkp": 64, "num_q_tiles": 4}
    attrs = {"causal": True, "heads_per_unroll": 2, "num_cascade_stages": 4}
    return launch("flash_attention", dims, "attention", tile, (8, 4), "seq_first", attrs)


def decode_ffn(hidden: int) -> Listing:
    return listing([gemv("o", 2048, 2048), gemv("gate", hidden, 2048), gemv("down", 2048, hidden, m_input=1)])


def namespace(base: Listing, **changes: Any) -> Any:
    """A program that the listing format itself would refuse."""
    keys = ("name", "arguments", "launches", "options", "target")
    return SimpleNamespace(**{k: changes.get(k, getattr(base, k)) for k in keys})


Make = Callable[[], Any]
CASES: list[tuple[str, str, Make, Make]] = [
    ("D8", "silent", lambda: listing([add("a")], target="npu1"), lambda: listing([add("a")])),
    ("B5", "compile", lambda: decode_ffn(12288), lambda: decode_ffn(8192)),
    ("M10", "compile", lambda: decode_ffn(9728), lambda: decode_ffn(6144)),
    ("M10", "compile", lambda: decode_ffn(11008), lambda: listing([gemv("down", 2048, 11008, m_input=1)])),
    ("B14", "silent",
     lambda: namespace(listing([add("a")]), arguments=(SimpleNamespace(name="a_a", nbytes=(1 << 32) + 2),)),
     lambda: namespace(listing([add("a")]), arguments=(SimpleNamespace(name="a_a", nbytes=1 << 32),))),
    ("G13", "silent", lambda: listing([gemm("q")], output_format="xclbin"),
     lambda: listing([gemm("q", "drain")], output_format="xclbin")),
    ("G14", "silent",
     lambda: listing([gemm(n, tile_n=t, attrs={"symbol": "mm"}) for n, t in (("q", 128), ("k", 64))]),
     lambda: listing([gemm(n, tile_n=t, attrs={"symbol": f"mm{t}"}) for n, t in (("q", 128), ("k", 64))])),
    ("V4", "compile", lambda: listing([gemv("o", 1024, 7168, 4, 2)], ping_pong=True),
     lambda: listing([gemv("o", 1024, 7168, 4, 1)], ping_pong=True)),
    ("V5", "compile", lambda: listing([gemv("down", 2048, 8192)], ping_pong=True),
     lambda: listing([gemv("down", 2048, 8192)])),
    ("V8", "compile",
     lambda: listing([gemv(n, 2048, k, symbol="matvec") for n, k in (("q", 2048), ("down", 4096))]),
     lambda: listing([gemv(n, 2048, k, symbol=f"matvec{k}") for n, k in (("q", 2048), ("down", 4096))])),
    ("E7", "silent", lambda: listing([rope("q", "half_split"), rope("k", "interleaved")]),
     lambda: listing([rope("q", "half_split"), rope("k", "half_split")])),
    ("F16", "compile", lambda: listing([attention(), add("a")]), lambda: listing([attention()])),
    ("S5", "place", lambda: layer_norm(("w", 0), ("b", 0)), lambda: layer_norm(("wb", 0), ("wb", 768))),
    ("M1", "silent",
     lambda: listing([launch("eltwise_add", {"n": 4096}, "a", {"tile": 512}, attrs={"bare_herd": 1})]),
     lambda: listing([add("a")])),
    ("M2", "compile", lambda: namespace(listing([add("a")]), launches=(add("a"), add("a"))),
     lambda: listing([add("a"), add("b")])),
    ("M3", "build",
     lambda: Listing("p", (*listing([add("a")]).arguments, Argument("spare", (4,))), (add("a"),)),
     lambda: Listing(
         "p",
         (*listing([add("a")]).arguments, Argument("spare", (4,))),
         (add("a"),),
         {"placeholders": ["spare"]},
     )),
    ("M4", "silent", lambda: listing([gemm(n, scratch=("f32", 0)) for n in ("q", "k")]),
     lambda: listing([gemm(n) for n in ("q", "k")])),
    ("M6", "compile", lambda: listing([add(f"a{i}") for i in range(11)]),
     lambda: listing([add(f"a{i}") for i in range(10)])),
    ("M9", "compile", lambda: listing([add("a", a=("packed", 4096))], rank_reducing_subviews=False),
     lambda: listing([add("a", a=("packed", 4096))])),
    ("M11", "runtime", lambda: listing([add("a")], name="ffn", instance_name="o_ffn"),
     lambda: listing([add("a")], name="ffn", instance_name="ffn")),
]  # fmt: skip

SWITCHED: list[tuple[str, Make, Make]] = [
    ("G15", lambda: listing([add("a"), gemm("down", k=4096, n=2048)]),
     lambda: listing([gemm("down", k=4096, n=2048), add("a")])),
    ("G16", lambda: listing([gemm("q", "drain"), add("a")]), lambda: listing([gemm("q", "drain")])),
    ("M6", lambda: listing([add(f"a{i}") for i in range(9)]),
     lambda: listing([add(f"a{i}") for i in range(8)])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "shows_as", "bad", "good"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)]
)
def test_program_rule_trips_and_neighbour_passes(rule: str, shows_as: str, bad: Make, good: Make) -> None:
    assert [v.rule_id for v in check_listing(good())] == []
    hit = [v for v in check_listing(bad()) if v.rule_id == rule]
    assert hit
    assert {v.shows_as for v in hit} == {shows_as}
    assert all(v.values and v.message for v in hit)


@pytest.mark.parametrize(("rule", "bad", "good"), SWITCHED)
def test_contradicted_program_rules_need_a_switch(rule: str, bad: Make, good: Make) -> None:
    assert check_listing(bad()) == []
    assert {v.rule_id for v in check_listing(bad(), [rule])} == {rule}
    assert check_listing(good(), [rule]) == []


def test_context_limit_of_a_process() -> None:
    assert check_session(9) == []
    assert [v.rule_id for v in check_session(10)] == ["R1"]


def test_every_program_rule_has_a_case() -> None:
    tested = {c[0] for c in CASES} | {c[0] for c in SWITCHED} | {"R1"}
    wanted = {r.id for r in RULES.values() if r.enforcement != "fact" and {"program", "session"} & set(r.ops)}
    assert wanted - tested == set()
    assert {r for r, _, _ in SWITCHED if r != "M6"} <= SWITCHES


def test_launch_violations_carry_the_launch_name() -> None:
    broken = gemv("lm_head", 2048, 11008, 2, 2)
    found = check_listing(listing([add("a"), broken]))
    assert [(v.rule_id, v.launch) for v in found] == [("V4", "lm_head")]
    assert str(found[0]).startswith("launch lm_head: rule V4 (compile): one core needs")
