"""Deployments of models: opened with `llms.verify`, described for reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_npu.core.options import NpuOptions
from pytest_npu.device.driver import Device


def open_default_deployment(folder: Path, options: NpuOptions, device: Device) -> Any:
    """Open the deployment of a model folder with `llms.verify`."""
    from llms.checkpoints import CheckpointError
    from llms.verify.contract.deployment import Deployment, DeploymentError

    try:
        opened = Deployment.from_folder(
            folder, model_choice=options.model, checkpoint=options.checkpoint, use_cache=options.use_cache
        )
        _ = opened.checkpoint  # resolve it now: a missing one is one clear error, not one per gate
    except (CheckpointError, DeploymentError) as error:
        pytest.fail(f"{folder.name}: {error}", pytrace=False)
    return opened


def describe(opened: Any) -> dict[str, Any]:
    """What a report says about a deployment: checkpoint, variant, configuration."""
    checkpoint = getattr(opened, "checkpoint", None)
    fields = ("label", "kind", "path", "content_hash")
    config = getattr(opened, "config", None)
    config = config() if callable(config) else config
    return {
        "checkpoint": {name: _text(getattr(checkpoint, name, None)) for name in fields}
        if checkpoint
        else None,
        "variant": _text(getattr(opened, "model_name", None)),
        "config": {k: v for k, v in vars(config).items() if isinstance(v, (int, float, str, bool))}
        if hasattr(config, "__dict__")
        else {},
    }


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
