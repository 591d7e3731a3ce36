"""Find the best legal configuration of a kernel at a shape and put it into the registry."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_registry import registry_lookup as lookup
from kernel_registry import store
from kernel_registry.measure import MeasurementUnavailable, Measurer, Numerics, Timed
from kernel_registry.schema import row_id
from kernel_registry.shapes import Request, RequestError

if TYPE_CHECKING:
    from npu_twin.constraints import Config

VARIANTS = ("rms_norm", "rope", "flash_attention")
"""Kernels whose methods compute different things; of the others the fastest method of the tier is taken."""
UNCONFIRMED = "K tiling not confirmed on silicon"


@dataclass(frozen=True)
class Outcome:
    """What a sweep did for one request: ``added``, ``updated``, ``unchanged`` or ``known``."""

    outcome: str
    row_id: str
    latency_us: float | None
    tried: int


def candidates(request: Request) -> tuple[Config, ...]:
    """Legal configurations. Raises RequestError when there is none."""
    from npu_twin.constraints import legal_configs

    variant: dict[str, Any] = {"method": request.method, "precision": request.tier, "causal": request.causal}
    configs = legal_configs(request.op, request.dims, **variant)
    if not configs:
        raise RequestError(f"{request}: no legal configuration; pad or split the shape")
    return configs


def _preference(config: Config) -> tuple[float, ...]:
    """Order among configurations that the cost model cannot tell apart: more cores, two heads at a time,
    larger tiles, an inner K tile near 256, as published rows prefer.
    """
    area = math.prod(size for key, size in config.tile.items() if not key.startswith("tile_k"))
    k = config.tile.get("tile_k_l2", 256)
    heads = config.attrs.get("heads_per_unroll", 1)
    return (-config.cores, -config.herd[0], -heads, -area, max(k, 256) / min(k, 256))


def ranked(request: Request, measurer: Measurer) -> list[tuple[Config, Timed]]:
    """Measured configurations with their times, the best first.

    Raises MeasurementUnavailable when none of the legal ones can be built here.
    """
    from npu_twin import timing

    configs = sorted(candidates(request), key=_preference)
    if len(configs) > measurer.shortlist:
        configs = sorted(configs, key=timing.launch_us)[: measurer.shortlist]
    timed = [(config, times) for config in configs if (times := measurer.times(config)) is not None]
    if not timed:
        raise MeasurementUnavailable(
            f"{request}: none of {len(configs)} legal configurations has a compiled kernel; "
            f"the first is {configs[0].describe()}"
        )
    # Differences below the measurer's resolution mean nothing: there the preference decides.
    fastest = min(times.cost_us for _, times in timed)
    limit = fastest + max(measurer.resolution * fastest, measurer.resolution_us)
    return sorted(timed, key=lambda pair: max(limit, pair[1].cost_us))


def _known(request: Request, root: Path) -> lookup.KernelConfig | None:
    try:
        return lookup.config(
            request.op,
            method=request.method,
            output_dtype=request.output_dtype,
            precision=request.precision,
            causal=request.causal,
            registry=root,
            **request.dims,
        )
    except lookup.UnmeasuredShape:
        return None


def sweep(
    request: Request,
    measurer: Measurer,
    root: Path,
    *,
    used_by: Sequence[str] = (),
    with_numerics: bool = True,
    only_missing: bool = False,
    keep_numerics: bool = False,
) -> Outcome:
    """Measure, choose and store. Repeating it changes nothing but ``used_by``.

    With ``only_missing`` a shape that has a usable row is left as it is, apart from the tags. With
    ``keep_numerics`` error figures that a row has already are not computed again. Raises RequestError,
    MeasurementUnavailable or RegistryError.
    """
    if only_missing and (known := _known(request, root)) is not None:
        row = _row_of(known.row_id, request.op, root)
        if used_by and row is not None:
            store.put({**row, "used_by": used_by}, root)
        return Outcome("known", known.row_id, known.latency_us, 0)
    measured = ranked(request, measurer)
    for config, times in measured:
        row = build_row(request, config, times.latency_us, measurer, used_by)
        old = _row_of(row["id"], request.op, root)
        kept = keep_numerics and old is not None and "mean_rel_L1" in old["figures"]
        numerics = measurer.numerics(config) if with_numerics and not kept else None
        if numerics is not None:
            _add_numerics(row, numerics)
        elif old is not None:
            row["figures"] = {**old["figures"], **row["figures"]}
            row.update({k: old[k] for k in ("status", "tolerance", "note") if k in old})
        outcome = store.put(row, root, replace=partial(_superseded, new=row))
        if row["status"] != "silent_corruption":
            return Outcome(outcome, row["id"], times.latency_us, len(measured))
    raise MeasurementUnavailable(f"{request}: every configuration that runs gives wrong numbers")


def _row_of(identity: str, op: str, root: Path) -> dict[str, Any] | None:
    return next((row for row in store.read(root, op) if row["id"] == identity), None)


def build_row(
    request: Request,
    config: Config,
    latency_us: float,
    measurer: Measurer,
    used_by: Sequence[str],
) -> dict[str, Any]:
    """The registry row of one measured configuration, without error figures."""
    row: dict[str, Any] = {
        "op": request.op,
        "tier": request.precision if request.op == "gemm" else lookup.KERNELS[request.op].tier,
        "dims": request.dims,
        "dtype_out": request.output_dtype,
        "method": config.method,
        "tile": dict(config.tile),
        "herd": list(config.herd),
        "attrs": dict(config.attrs),
        "context": "standalone",
        "status": "pass",
        "provenance": measurer.provenance,
        "figures": {"latency_us": round(latency_us, 2)},
        "used_by": sorted(set(used_by)),
        "date": datetime.date.today().isoformat(),
        "source": measurer.source,
    }
    if measurer.provenance == "twin" and _unconfirmed_k_tiling(config):
        row["note"] = UNCONFIRMED
    return {**row, "id": row_id(row)}


def _add_numerics(row: dict[str, Any], numerics: Numerics) -> None:
    figures = {name: float(f"{value:.4g}") for name, value in numerics.figures.items()}
    row["figures"] |= {**figures, "elements_over": numerics.elements_over}
    row |= {"tolerance": dict(numerics.tolerance), "status": numerics.status}
    if numerics.elements_over:
        over = f"{numerics.elements_over} elements over the tolerance"
        row["note"] = "; ".join([*filter(None, [row.get("note")]), over])


def _unconfirmed_k_tiling(config: Config) -> bool:
    """Whether a GEMM's K is no power of two and no passing silicon row has this K tiling: silicon is known
    to give wrong numbers for some of those.
    """
    if config.op != "gemm":
        return False
    K, tiling = config.dims["K"], (config.tile["tile_k_l2"], config.tile["tile_k_l1"])
    return K & (K - 1) != 0 and (K, *tiling) not in _confirmed_k_tilings()


@lru_cache(maxsize=1)
def _confirmed_k_tilings() -> frozenset[tuple[int, int, int]]:
    rows = store.read(lookup.PACKAGED, "gemm")
    return frozenset(
        (r["dims"]["K"], r["tile"]["tile_k_l2"], r["tile"]["tile_k_l1"])
        for r in rows
        if lookup.usable(r) and r["provenance"] != "twin"
    )


def _superseded(old: Any, new: Any) -> bool:
    """Whether ``new`` replaces ``old``: one row per shape, tier and variant of each measuring device."""
    keys = ["provenance", "dims", "dtype_out", "tier", "context", *["method"] * (new["op"] in VARIANTS)]
    return bool(
        new["provenance"] == "twin"
        and new["status"] != "silent_corruption"
        and all(old.get(k) == new.get(k) for k in keys)
        and (old.get("attrs") or {}).get("causal") == (new.get("attrs") or {}).get("causal")
    )
