"""Rows of the twin against its timing model as it is now: after a recalibration they no longer agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kernel_registry import store
from kernel_registry.measure import TwinMeasurer, config_of
from kernel_registry.registry_lookup import DIMS, usable
from kernel_registry.shapes import Request
from kernel_registry.sweep import VARIANTS, ranked

COMMAND = "python -m kernel_registry sweep --stale"
_ROUNDED_US = 0.01


def modelled_us(row: Mapping[str, Any]) -> float:
    """What the timing model says now for the configuration of a row, in microseconds."""
    from npu_twin import timing

    return timing.standalone_us(config_of(row))


def is_stale(row: Mapping[str, Any]) -> bool:
    """Whether a usable row of the twin has another time than the timing model, rounding aside."""
    if row["provenance"] != "twin" or not usable(row):
        return False
    stored = row["figures"].get("latency_us")
    now = modelled_us(row)
    return stored is None or not math.isclose(stored, now, rel_tol=store.FIGURE_NOISE, abs_tol=_ROUNDED_US)


def problems(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """One sentence per row of the twin that the timing model no longer agrees with."""
    return [
        f"row {row['id']}: latency_us {row['figures'].get('latency_us')} is not what the twin models now, "
        f"{modelled_us(row):.2f}; run: {COMMAND}"
        for row in rows
        if is_stale(row)
    ]


def request_of(row: Mapping[str, Any]) -> Request:
    """The request that a sweep answers with a row of this shape, tier and variant."""
    tier = row.get("tier")
    return Request(
        row["op"],
        tuple(row["dims"][name] for name in DIMS[row["op"]]),
        precision=tier if tier in ("high", "low") else "high",
        output_dtype=row.get("dtype_out", "bf16"),
        causal=bool((row.get("attrs") or {}).get("causal")),
        method=row["method"] if row["op"] in VARIANTS else "",
    )


def outranked(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of requests of which no row has the configuration that a sweep on the twin would choose now."""
    groups: dict[Request, list[Mapping[str, Any]]] = {}
    for row in rows:
        if usable(row):
            groups.setdefault(request_of(row), []).append(row)
    beaten: list[Mapping[str, Any]] = []
    for request, members in groups.items():
        if all(row["provenance"] == "twin" for row in members):
            best, _ = ranked(request, TwinMeasurer())[0]
            chosen = (best.method, dict(best.tile), best.herd)
            if all((r["method"], r["tile"], tuple(r["herd"])) != chosen for r in members):
                beaten += members
    return beaten


def stale_requests(root: Path) -> dict[Request, bool]:
    """Requests whose rows have another time, or would be another choice, than the timing model says now.

    The value tells whether the rows have error figures. Raises RegistryError.
    """
    requests: dict[Request, bool] = {}
    for rows in store.read_all(root).values():
        for row in [*filter(is_stale, rows), *outranked(rows)]:
            request = request_of(row)
            requests[request] = requests.get(request, False) or "mean_rel_L1" in row["figures"]
    return requests
