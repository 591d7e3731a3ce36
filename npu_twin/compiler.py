"""The twin's compiler: program -> listing, refusing what the real tool chain would refuse.

Rules that only show on the device (``hang``, ``runtime``, ``silent``) compile; the device model meets them
again when the listing is loaded and acts on the first two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from npu_twin.exceptions import CompileError, DataflowError, ListingError
from npu_twin.listing import TARGET, TOOLCHAIN, Listing

TOOLCHAIN_IDENTITY = TOOLCHAIN
"""Name and version of the compiler; part of every cache key."""


def compile_program(program: Mapping[str, object]) -> Listing:
    """Compile a program, given as the JSON object of a listing (``name``, ``arguments``, ``launches``).

    Header fields may be missing. Raises CompileError naming program, launch, broken rules with their values
    and a configuration that would fit; DataflowError when a launch reads what nothing has written or an
    output stays unwritten; CompileError, too, for a malformed program.
    """
    name = str(program.get("name", "unnamed"))
    data: dict[str, Any] = {key: value for key, value in program.items() if value is not None}
    try:
        listing = dataclasses.replace(Listing.from_mapping(data), toolchain=TOOLCHAIN)
    except ListingError as error:
        raise CompileError(f"program {name}: {error}", program=name, launch=_launch_of(error)) from error
    _check_constraints(listing)
    _check_dataflow(listing)
    return listing


def _check_constraints(listing: Listing) -> None:
    from npu_twin import constraints

    if listing.target != TARGET:
        raise CompileError(
            f"program {listing.name}: target {listing.target!r} is not built here, only {TARGET!r}; code for "
            "another array generation would leave zeros",
            program=listing.name,
        )
    violations = constraints.stops_compilation(constraints.check_listing(listing))
    if violations:
        first = next((v.launch for v in violations if v.launch), None)
        lines = [f"program {listing.name} cannot be compiled for {TARGET}:"]
        lines.extend(f"  {violation}" for violation in violations)
        raise CompileError("\n".join(lines), program=listing.name, launch=first, violations=violations)


def _check_dataflow(listing: Listing) -> None:
    problems = listing.dataflow_problems()
    if problems:
        raise DataflowError(
            f"program {listing.name}: " + "; ".join(text for _, text in problems),
            program=listing.name,
            launch=next((launch for launch, _ in problems if launch), None),
        )


def _launch_of(error: ListingError) -> str | None:
    parts = error.where.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "launches" else None
