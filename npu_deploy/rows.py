"""Registry rows of a new model: derived from its blocks, swept on the twin, stored where they belong."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from npu_deploy.errors import PRECONDITION, DeployError

if TYPE_CHECKING:
    from kernel_registry.shapes import Request
    from llms.llama_kernel_builder.kernels import Requirement

# Operations up to which the twin also computes a row's error figures; larger shapes get their latency only,
# so that a model of half a billion parameters takes seconds. Phase 1 judges every shape.
NUMERICS_LIMIT = 3e7


def check_writable(registry: Path) -> None:
    """Raises DeployError when the rows could not be written."""
    folder = registry / "details"
    probe = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(probe, os.W_OK):
        raise DeployError(
            f"the kernel registry {registry} cannot be written; scaffold with --into DIR, which keeps the "
            "rows in the model's own folder",
            PRECONDITION,
        )


def sweep_rows(requirements: Sequence[Requirement], registry: Path, used_by: str) -> dict[str, int]:
    """Add a row, provenance `twin`, for every shape that no registry has; the numbers `required` and `added`.

    Raises DeployError naming a shape that has no kernel.
    """
    from kernel_registry import render
    from kernel_registry.measure import MeasurementUnavailable, TwinMeasurer
    from kernel_registry.schema import RegistryError
    from kernel_registry.shapes import Request, RequestError
    from kernel_registry.sweep import sweep

    measurer = TwinMeasurer(NUMERICS_LIMIT)
    added = 0
    for need in requirements:
        request = Request(need.op, need.shape, need.precision, need.output_dtype, need.causal)
        try:
            done = sweep(request, measurer, registry, used_by=[used_by], only_missing=True)
        except (RequestError, MeasurementUnavailable, RegistryError) as error:
            raise DeployError(f"no kernel for {need}: {error}", PRECONDITION) from error
        added += done.outcome != "known"
        if done.outcome == "known":
            _carry(request, done.row_id, registry, used_by)
    render.render(registry)  # known rows have a user more
    return {"required": len(requirements), "added": added}


def _carry(request: Request, row_id: str, registry: Path, used_by: str) -> None:
    """Copy a row that only another registry has, so that the one named here says who uses it."""
    from kernel_registry import registry_lookup, store

    if any(row["id"] == row_id for row in store.read(registry, request.op)):
        return
    row = next(row for row in registry_lookup.rows(request.op, request.dims, registry) if row["id"] == row_id)
    store.put({**row, "used_by": [used_by]}, registry)
