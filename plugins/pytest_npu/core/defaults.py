"""What our own hooks do when no other plugin answers: devices, deployments and facts of this project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_npu.core.constants import NPU2
from pytest_npu.core.options import NpuOptions
from pytest_npu.device.driver import Device, open_default_device
from pytest_npu.device.preflight import feature as preflight


class DefaultHooks:
    """The last answer to every hook of `pytest_npu.newhooks` that asks for one."""

    def __init__(self, options: NpuOptions) -> None:
        self._options = options

    @pytest.hookimpl(trylast=True)
    def pytest_npu_open_device(self, name: str) -> Device:
        """Open a driver of the host runtime; `pytest_npu_open_device`."""
        return open_default_device(name)

    @pytest.hookimpl(trylast=True)
    def pytest_npu_open_deployment(self, folder: Path, options: NpuOptions) -> Any:
        """Open a deployment of `llms.verify`; `pytest_npu_open_deployment`."""
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

    @pytest.hookimpl(trylast=True)
    def pytest_npu_preflight(self, device: Device | None) -> list[dict[str, Any]]:
        """Facts about the host, and about the NPU when AMD's driver opened it; `pytest_npu_preflight`."""
        on_silicon = (
            device is not None and device.name == NPU2 and getattr(device, "module", None) is not None
        )
        return preflight.device_facts(self._options.lock_file) if on_silicon else preflight.host_facts()
