"""Name that folders of earlier scaffolds import; see llms.llama_kernel_builder.deployment.compare."""

from __future__ import annotations

from typing import Any

from llms.llama_kernel_builder.deployment.compare import comparison
from llms.verify.contract.deployment import Deployment, load_adapter

__all__ = ["beside_silicon"]


def beside_silicon(deployment: Deployment) -> dict[str, Any]:
    """Payload of a record `comparison`."""
    return comparison(deployment.name, load_adapter(deployment.folder).CONFIG)
