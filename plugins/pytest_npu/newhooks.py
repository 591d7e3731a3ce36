"""Hooks of the plugin, for conftest files and other plugins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_npu.core.options import NpuOptions
    from pytest_npu.device.driver import Device


@pytest.hookspec(firstresult=True)
def pytest_npu_open_device(config: pytest.Config, name: str) -> Device | None:
    """Open the device `name` (`twin` or `npu2`).

    The first plugin that returns an object with `name`, `label` and `clock` wins. Raise
    `pytest_npu.DeviceUnavailable(reason, remedy)` when the device cannot be used.
    """


@pytest.hookspec(firstresult=True)
def pytest_npu_open_deployment(
    config: pytest.Config, folder: Path, options: NpuOptions, device: Device
) -> Any:
    """Open the deployment of the model in `folder`; called once per model and process.

    A stand-in offers what its tests use; the plugin itself reads `checkpoint` (label, kind, path,
    content_hash), `model_name` and `config`, calls `hf_reference()` for the fixture of that name and
    `release_runners()` at the end, each if it is there. The default builds
    `llms.verify.contract.deployment.Deployment` from the folder's adapter.
    """


@pytest.hookspec()
def pytest_npu_preflight(config: pytest.Config, device: Device | None) -> list[dict[str, Any]] | None:
    """Facts about the machine to check before device work: `{"name", "value", "ok", "remedy"}` each.

    `ok` False with `--npu` ends the run with exit code 4 and the remedy; `ok` None is information only.
    """


@pytest.hookspec()
def pytest_npu_reports(config: pytest.Config, folders: dict[str, Path]) -> None:
    """The reports of the run were written; `folders` has the run folder of every model."""


@pytest.hookspec()
def pytest_npu_event(config: pytest.Config, event: dict[str, Any]) -> None:
    """An event of the run was logged, in this process or in a worker of pytest-xdist.

    `pytest_npu.core.events` lists events and their fields. Events of workers arrive in a thread of their own:
    an implementation must not raise.
    """
