"""Compile-time constraints of the NPU2 kernels: rules as data, checks of launches and programs, legal tiles.

``check(launch)`` judges one launch, ``check_listing(listing)`` a whole program, each returning every
``Violation`` with the rule, its values and a configuration that would fit. ``legal_configs(op, dims)``
enumerates what a sweep may try. Rules that passing measurements contradict are off unless named in
``switches`` (see ``SWITCHES``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from npu_twin.constraints import attention, gemm, gemv, program, streaming
from npu_twin.constraints._types import (
    Config,
    Findings,
    Found,
    LaunchLike,
    Rule,
    ShowsAs,
    Violation,
)
from npu_twin.constraints.gemm import auto_method
from npu_twin.constraints.rules import COLUMNS, ROWS, RULES, SWITCHES
from npu_twin.constraints.search import TIER_METHODS, gemv_slices, legal_configs, nearest_legal

_Check = Callable[[LaunchLike, frozenset[str]], Findings]

_CHECKS: Mapping[str, tuple[_Check, tuple[str, ...]]] = {
    "gemm": (gemm.check_gemm, gemm.TILE_KEYS),
    "gemv": (gemv.check_gemv, gemv.TILE_KEYS),
    "gemv_add": (gemv.check_gemv_add, gemv.TILE_KEYS),
    "norm_gateup_swiglu": (gemv.check_norm_gateup_swiglu, ()),
    "rms_norm": (streaming.check_rms_norm, ()),
    "layer_norm": (streaming.check_layer_norm, ()),
    "rope": (streaming.check_rope, ()),
    "flash_attention": (attention.check_flash_attention, attention.TILE_KEYS),
    "eltwise_add": (streaming.check_eltwise_add, ("tile",)),
    "bias_add": (streaming.check_bias_add, ()),
    "silu_mul": (streaming.check_silu_mul, ("tile_n",)),
    "gelu": (streaming.check_gelu, ("tile_n",)),
}

STOPS_COMPILATION: frozenset[ShowsAs] = frozenset({"build", "compile", "place"})
"""Ways of showing that end the compilation; the others appear when the program runs."""


def check_raw(launch: LaunchLike, switches: Iterable[str] = ()) -> list[Found]:
    """Broken rules of one launch without the search for a suggestion. Raises ValueError for an unknown
    operation.
    """
    if launch.op not in _CHECKS:
        raise ValueError(f"unknown operation {launch.op!r}; known: {', '.join(_CHECKS)}")
    judge, keys = _CHECKS[launch.op]
    missing = [key for key in keys if key not in launch.tile]
    if missing:
        return [
            Found(
                "T1", f"{launch.op} needs the tile sizes {', '.join(keys)}", {"missing": ", ".join(missing)}
            )
        ]
    found = list(judge(launch, frozenset(switches)))
    columns, rows = launch.herd
    if columns > COLUMNS or rows > ROWS:
        found.append(
            Found("D1", f"the array has {COLUMNS} columns and {ROWS} rows", {"herd": f"{columns}x{rows}"})
        )
    if launch.attrs.get("transpose", False):
        found.append(Found("B13", "a DMA cannot transpose bf16; transpose on the host", {"transpose": True}))
    return found


def check(launch: LaunchLike, switches: Iterable[str] = ()) -> list[Violation]:
    """Every rule that one launch breaks, each with values and a configuration that would fit.

    ``switches`` turns on rules that are off by default. Raises ValueError for an unknown operation.
    """
    found = check_raw(launch, switches)
    if not found:
        return []
    suggestion = _suggest(launch)
    return [_violation(f, suggestion, getattr(launch, "name", "")) for f in found]


def check_listing(listing: program.ListingLike, switches: Iterable[str] = ()) -> list[Violation]:
    """Every rule that a program breaks: those of its launches, then those of the whole."""
    violations = [v for launch in listing.launches for v in check(launch, switches)]
    violations += [_violation(f, "", "") for f in program.check_program(listing, frozenset(switches))]
    return violations


def check_session(elfs: int) -> list[Violation]:
    """R1: violations of a process that keeps ``elfs`` programs loaded at once."""
    return [_violation(f, "unload programs or merge launches", "") for f in program.check_session(elfs)]


def stops_compilation(violations: Iterable[Violation]) -> list[Violation]:
    """Those that end a compilation; what is left hangs, fails or corrupts at run time."""
    return [v for v in violations if v.shows_as in STOPS_COMPILATION]


def _violation(found: Found, suggestion: str, launch: str) -> Violation:
    shows_as = found.shows_as or RULES[found.rule_id].shows_as
    return Violation(found.rule_id, shows_as, found.message, dict(found.values), suggestion, launch)


def _suggest(launch: LaunchLike) -> str:
    config = nearest_legal(launch.op, launch.method, launch)
    if config is None:
        dims = ", ".join(f"{k}={v}" for k, v in launch.dims.items())
        return f"no legal {launch.op} configuration is known for {dims}; pad or split the shape"
    return f"this would fit: {config.describe()}"


def rule_table() -> list[dict[str, Any]]:
    """All rules as plain dictionaries, for pages and reports."""
    return [
        {
            "id": rule.id,
            "title": rule.title,
            "shows_as": rule.shows_as,
            "ops": list(rule.ops),
            "enforcement": rule.enforcement,
            "source": rule.source,
        }
        for rule in RULES.values()
    ]


__all__ = [
    "RULES",
    "STOPS_COMPILATION",
    "SWITCHES",
    "TIER_METHODS",
    "Config",
    "Found",
    "LaunchLike",
    "Rule",
    "Violation",
    "auto_method",
    "check",
    "check_listing",
    "check_raw",
    "check_session",
    "gemv_slices",
    "legal_configs",
    "rule_table",
    "stops_compilation",
]
