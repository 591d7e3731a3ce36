"""No rule refuses a configuration that is published as passing; the published failures are all explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kernel_registry
from npu_twin.constraints import TIER_METHODS, Config, check, legal_configs

_DETAILS = Path(kernel_registry.__file__).parent / "details"
_TILE_KEYS = {
    "gemm": {"tile_m", "tile_k_l2", "tile_k_l1", "tile_n"},
    "eltwise_add": {"tile"},
    "silu_mul": {"tile_n"},
    "gelu": {"tile_n"},
    "flash_attention": {"lqp", "lkp", "num_q_tiles", "dv_tile"},
}


def published() -> list[dict[str, Any]]:
    found = []
    for path in sorted(_DETAILS.glob("*.json")):
        rows = json.loads(path.read_text())["rows"]
        found += [r for r in rows if r["provenance"] == "published-silicon"]
    return found


ROWS = published()


def configured(row: dict[str, Any]) -> bool:
    return bool(row.get("herd")) and _TILE_KEYS.get(row["op"], set()) <= set(row["tile"])


def config(row: dict[str, Any]) -> Config:
    return Config(
        row["op"], row["method"], row["dims"], row["tile"], tuple(row["herd"]), row.get("attrs") or {}
    )


PASSING = [r for r in ROWS if r["status"] in ("pass", "in_tier")]
FAILING = [r for r in ROWS if r["status"] not in ("pass", "in_tier")]


def test_there_are_enough_rows_to_mean_something() -> None:
    assert len([r for r in PASSING if configured(r)]) > 220
    assert len([r for r in FAILING if configured(r)]) > 35


@pytest.mark.parametrize("row", [r for r in PASSING if configured(r)], ids=lambda r: r["id"])
def test_no_rule_refuses_a_passing_row(row: dict[str, Any]) -> None:
    assert [str(v) for v in check(config(row))] == []


_SHOWS = {
    "compile_fail": {"build", "compile", "place"},
    "runtime_fail": {"runtime"},
    "hang": {"hang"},
    "silent_corruption": {"silent"},
}


@pytest.mark.parametrize("row", [r for r in FAILING if configured(r)], ids=lambda r: r["id"])
def test_every_published_failure_is_refused_in_its_own_way(row: dict[str, Any]) -> None:
    found = {v.shows_as for v in check(config(row))}
    assert found
    assert found <= _SHOWS[row["status"]]


@pytest.mark.parametrize(
    "row",
    [r for r in PASSING if r["context"] == "standalone" and configured(r)],
    ids=lambda r: r["id"],
)
def test_every_passing_shape_has_something_to_sweep(row: dict[str, Any]) -> None:
    precision = next(
        (t for t, methods in TIER_METHODS.items() if row["op"] == "gemm" and row["method"] in methods), "high"
    )
    causal = bool((row.get("attrs") or {}).get("causal"))
    assert legal_configs(row["op"], row["dims"], precision=precision, causal=causal)
