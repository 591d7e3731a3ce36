"""Find the best legal configuration of a kernel at a shape and put it into the registry."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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

    request: Request
    outcome: str
    row_id: str
    latency_us: float | None
    tried: int


def candidates(request: Request) -> tuple[Config, ...]:
    """Legal configurations. Raises RequestError when there is none."""
    from npu_twin.constraints import legal_configs

    found = legal_configs(
        request.op,
        request.dims,
        method=request.method,
        precision=request.tier,
        causal=request.causal,
    )
    if not found:
        raise RequestError(f"{request}: no legal configuration; pad or split the shape")
    return found


def _preference(config: Config) -> tuple[float, ...]:
    """Order among configurations that the cost model cannot tell apart: more cores, two heads at a time,
    larger tiles, an inner K tile near 256, as published rows prefer.
    """
    t = config.tile
    area = 1.0
    for key, value in t.items():
        if not key.startswith("tile_k"):
            area *= value
    k = t.get("tile_k_l2", 256)
    heads = config.attrs.get("heads_per_unroll", 1)
    return (-config.cores, -config.herd[0], -heads, -area, max(k, 256) / min(k, 256))


def ranked(request: Request, measurer: Measurer) -> list[tuple[Config, Timed]]:
    """Measured configurations with their times, the best first.

    Raises MeasurementUnavailable when none of the legal ones can be built here.
    """
    from npu_twin import timing

    found = sorted(candidates(request), key=_preference)
    if len(found) > measurer.shortlist:
        found = sorted(found, key=timing.launch_us)[: measurer.shortlist]
    timed = [measurer.times(config) for config in found]
    known = [(t.cost_us, i) for i, t in enumerate(timed) if t is not None]
    if not known:
        raise MeasurementUnavailable(
            f"{request}: none of {len(found)} legal configurations has a compiled kernel; "
            f"the first is {found[0].describe()}"
        )
    # Differences below the measurer's resolution mean nothing: there the preference decides.
    fastest = min(t for t, _ in known)
    limit = fastest + max(measurer.resolution * fastest, measurer.resolution_us)
    known.sort(key=lambda pair: (pair[0] > limit, pair[0] if pair[0] > limit else pair[1]))
    return [(found[i], t) for _, i in known if (t := timed[i]) is not None]


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
        if used_by and any(r["id"] == known.row_id for r in store.read(root, request.op)):
            store.tag(root, request.op, known.row_id, used_by)
        return Outcome(request, "known", known.row_id, known.latency_us, 0)
    measured = ranked(request, measurer)
    for config, times in measured:
        latency = times.latency_us
        row = build_row(request, config, latency, None, measurer, used_by)
        has_numerics = _keep_numerics(row, root)
        if with_numerics and not (keep_numerics and has_numerics):
            numerics = measurer.numerics(config)
            if numerics is not None:
                row = build_row(request, config, latency, numerics, measurer, used_by)
        outcome = _store(row, root)
        if row["status"] != "silent_corruption":
            return Outcome(request, outcome, row["id"], latency, len(measured))
    raise MeasurementUnavailable(f"{request}: every configuration that runs gives wrong numbers")


def _keep_numerics(row: dict[str, Any], root: Path) -> bool:
    """Take over the error figures that the same row already has; False when it has none."""
    for old in store.read(root, row["op"]):
        if old["id"] == row["id"]:
            row["figures"] = {**old["figures"], **row["figures"]}
            row.update({k: old[k] for k in ("status", "tolerance", "note") if k in old})
            return "mean_rel_L1" in old["figures"]
    return False


def _store(row: dict[str, Any], root: Path) -> str:
    return store.put(row, root, replace=lambda old: _superseded(old, row))


def build_row(
    request: Request,
    config: Config,
    latency: float,
    numerics: Numerics | None,
    measurer: Measurer,
    used_by: Sequence[str],
) -> dict[str, Any]:
    """The registry row of one measured configuration."""
    figures: dict[str, Any] = {"latency_us": round(latency, 2)}
    row: dict[str, Any] = {
        "op": request.op,
        "dims": request.dims,
        "dtype_out": request.output_dtype,
        "method": config.method,
        "tile": dict(config.tile),
        "herd": list(config.herd),
        "attrs": dict(config.attrs),
        "context": "standalone",
        "status": "pass",
        "provenance": measurer.provenance,
        "figures": figures,
        "used_by": sorted(set(used_by)),
        "date": datetime.date.today().isoformat(),
        "source": measurer.source,
    }
    row["tier"] = request.precision if request.op == "gemm" else lookup.KERNELS[request.op].tier
    notes = [UNCONFIRMED] if measurer.provenance == "twin" and _unconfirmed_k_tiling(config) else []
    if numerics is not None:
        figures.update({k: _digits(v) for k, v in numerics.figures.items()})
        figures["elements_over"] = numerics.elements_over
        row["tolerance"] = dict(numerics.tolerance)
        row["status"] = numerics.status
        if numerics.elements_over:
            notes.append(f"{numerics.elements_over} elements over the tolerance")
    if notes:
        row["note"] = "; ".join(notes)
    row["id"] = row_id(row)
    return row


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


def _digits(value: float | int) -> float | int:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _superseded(old: Any, new: Any) -> bool:
    """Whether ``new`` replaces ``old``: one row per shape, tier and variant of each measuring device."""
    keys = ("provenance", "dims", "dtype_out", "tier", "context")
    same = all(old.get(k) == new.get(k) for k in keys)
    same = same and (old.get("attrs") or {}).get("causal") == (new.get("attrs") or {}).get("causal")
    if new["op"] in VARIANTS:
        same = same and old["method"] == new["method"]
    return bool(same and new["provenance"] == "twin" and new["status"] != "silent_corruption")
