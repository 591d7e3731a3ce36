"""Compile-time constraints of the NPU2 kernels: rules as data, checks of launches and programs, legal tiles.

``check(launch)`` judges one launch, ``check_listing(listing)`` a whole program, each returning every
``Violation`` with the rule, its values and a configuration that would fit. ``legal_configs(op, dims)``
enumerates what a sweep may try. Rules that passing measurements contradict are off unless named in
``switches`` (see ``SWITCHES``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from npu_twin.constraints import program
from npu_twin.constraints.rules import RULES, SWITCHES, Rule, Violation
from npu_twin.constraints.search import gemv_slices, legal_configs, nearest_legal
from npu_twin.npu2 import COLUMNS, ROWS
from npu_twin.ops import OPS
from npu_twin.ops.gemm import TIER_METHODS, auto_method
from npu_twin.opset import Config, Finding, LaunchLike, ShowsAs

if TYPE_CHECKING:
    from npu_twin.listing import Listing

STOPS_COMPILATION: frozenset[ShowsAs] = frozenset({"build", "compile", "place"})
"""Ways of showing that end the compilation; the others appear when the program runs."""


def check_raw(launch: LaunchLike, switches: Iterable[str] = ()) -> list[Finding]:
    """Broken rules of one launch without the search for a suggestion. Raises ValueError for an unknown
    operation.
    """
    if launch.op not in OPS:
        raise ValueError(f"unknown operation {launch.op!r}; known: {', '.join(OPS)}")
    op = OPS[launch.op]
    missing = [key for key in op.tile_keys if key not in launch.tile]
    if missing:
        needed = ", ".join(op.tile_keys)
        return [Finding("T1", f"{launch.op} needs the tile sizes {needed}", {"missing": ", ".join(missing)})]
    findings = list(op.check(launch, frozenset(switches)))
    columns, rows = launch.herd
    if columns > COLUMNS or rows > ROWS:
        findings.append(
            Finding("D1", f"the array has {COLUMNS} columns and {ROWS} rows", {"herd": f"{columns}x{rows}"})
        )
    if launch.attrs.get("transpose", False):
        findings.append(
            Finding("B13", "a DMA cannot transpose bf16; transpose on the host", {"transpose": True})
        )
    return findings


def check(launch: LaunchLike, switches: Iterable[str] = ()) -> list[Violation]:
    """Every rule that one launch breaks, each with values and a configuration that would fit.

    ``switches`` turns on rules that are off by default. Raises ValueError for an unknown operation.
    """
    findings = check_raw(launch, switches)
    if not findings:
        return []
    suggestion = _suggest(launch)
    return [_violation(f, suggestion, getattr(launch, "name", "")) for f in findings]


def check_listing(listing: Listing, switches: Iterable[str] = ()) -> list[Violation]:
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


def _violation(finding: Finding, suggestion: str, launch: str) -> Violation:
    shows_as = finding.shows_as or RULES[finding.rule_id].shows_as
    return Violation(finding.rule_id, shows_as, finding.message, dict(finding.values), suggestion, launch)


def _suggest(launch: LaunchLike) -> str:
    config = nearest_legal(launch.op, launch.method, launch)
    if config is None:
        dims = ", ".join(f"{k}={v}" for k, v in launch.dims.items())
        return f"no legal {launch.op} configuration is known for {dims}; pad or split the shape"
    return f"this would fit: {config.describe()}"


__all__ = [
    "RULES",
    "STOPS_COMPILATION",
    "SWITCHES",
    "TIER_METHODS",
    "Config",
    "Finding",
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
    "stops_compilation",
]
