"""The device of a run: opened once per process, refused once it is poisoned."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol

import pytest

from pytest_npu.core.constants import DEVICE_LABELS
from pytest_npu.core.exceptions import DevicePoisoned, DeviceUnavailable
from pytest_npu.device.supervised import poison_of


class Clock(Protocol):
    """The timer of performance numbers."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...


class Device(Protocol):
    """What the plugin needs of an opened driver."""

    @property
    def name(self) -> str:
        """`twin` or `npu2`."""
        ...

    @property
    def label(self) -> str:
        """`twin (modelled)` or `npu2 (measured)`; goes with every number."""
        ...

    @property
    def clock(self) -> Clock:
        """The device clock."""
        ...


def open_default_device(name: str) -> Device:
    """Open a driver of this project's host runtime.

    Raises DeviceUnavailable with reason and remedy.
    """
    try:
        from llms.llama_kernel_builder import driver
        from llms.llama_kernel_builder.exceptions import DriverUnavailable
    except ImportError as error:
        raise DeviceUnavailable(
            f"the host runtime llms.llama_kernel_builder cannot be imported ({error})",
            "Install the project into the Python that runs pytest: pip install -e .",
        ) from error
    try:
        device: Device = driver.select(name)
    except DriverUnavailable as error:
        raise DeviceUnavailable(error.reason, error.remedy) from error
    return device


class DeviceHolder:
    """Opens the device on first use and hands out the same object after that."""

    def __init__(self, config: pytest.Config, name: str, control: Path | None = None) -> None:
        self._config = config
        self._control = control
        self.name = name
        #: The device if it is open.
        self.opened: Device | None = None
        #: Facts that must agree before times of two runs are compared: driver, firmware, power mode.
        self.identity: dict[str, str] = {}

    @property
    def label(self) -> str:
        """Label of the device, known without opening it."""
        return self.opened.label if self.opened is not None else DEVICE_LABELS[self.name]

    def poisoned(self) -> str | None:
        """Why the device must not be used any more in this run, or None."""
        return poison_of(self._control)

    def open(self) -> Device:
        """Open the device.

        Raises DevicePoisoned after a failure that left it in an unknown state, DeviceUnavailable otherwise.
        """
        cause = self.poisoned()
        if cause is not None:
            raise DevicePoisoned(cause)
        if self.opened is None:
            self.opened = self._config.hook.pytest_npu_open_device(config=self._config, name=self.name)
            if self.opened is None:
                raise DeviceUnavailable(
                    f"nothing opened the device '{self.name}'", "Install the project: pip install -e ."
                )
        if self.opened.name != self.name:
            wrong, self.opened = self.opened.name, None
            raise DeviceUnavailable(
                f"'{self.name}' was asked for but '{wrong}' was opened",
                "A twin never stands in for silicon: check the plugin that implements pytest_npu_open_device",
            )
        return self.opened

    def now(self) -> float:
        """Device clock in seconds; 0.0 while the device is closed."""
        return self.opened.clock.now() if self.opened is not None else 0.0

    def require(self) -> None:
        """`--npu`: open the device or end the run with exit code 4."""
        try:
            self.open()
        except DeviceUnavailable as error:
            raise pytest.UsageError(
                f"--npu: no usable NPU: {error.reason}.\n  Remedy: {error.remedy}.\n"
                "  Without --npu the tests run on the digital twin."
            ) from error


def environment() -> dict[str, Any]:
    """What a report says about the machine and the software. Imports nothing heavy."""
    import importlib.metadata
    import platform
    import socket

    from fixed_order.instruction_sets import described

    versions = {}
    for package in (
        "pytest",
        "pytest-npu",
        "torch",
        "transformers",
        "numpy",
        "llvmlite",
        "pytest-xdist",
        "pytest-benchmark",
    ):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": described(),
        "executable": sys.executable,
        "versions": versions,
    }
