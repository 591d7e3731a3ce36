"""Which NPU the process talks to: AMD's `pyxrt` on silicon, or `npu_twin.pyxrt`.

This is the only module that knows both. Everything above it sees a `Driver`: the pyxrt module, a
label that goes with every number, and a clock. One driver per process; the default is the twin.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from .exceptions import DriverUnavailable

TWIN = "twin"
NPU2 = "npu2"


class Clock(Protocol):
    """The timer of every performance number. `label` says whose time it is and goes with every number."""

    label: str

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...

    def host_op(self, name: str, *, nbytes: int = 0, flops: int = 0) -> AbstractContextManager[None]:
        """Declare work of the host CPU, with the bytes it moves and the operations it does."""
        ...

    def watch_launches(self, sink: Callable[[LaunchEvent], None]) -> AbstractContextManager[None]:
        """Call `sink` with each kernel launch while open; never where the device has no trace."""
        ...


@dataclass(frozen=True)
class LaunchEvent:
    """One kernel launch on the device clock. Times in seconds."""

    program: str
    launch: str
    op: str
    start_s: float
    duration_s: float


@dataclass(frozen=True)
class Driver:
    """A driver module with the label and the clock that belong to it."""

    name: str
    module: Any
    label: str
    clock: Clock


class WallClock:
    """Silicon: time is what passes. Host operations take the time they take."""

    label = "npu2 (measured)"

    def now(self) -> float:
        """`time.perf_counter()` in seconds."""
        return time.perf_counter()

    def host_op(self, name: str, *, nbytes: int = 0, flops: int = 0) -> AbstractContextManager[None]:
        """Nothing to declare: the work itself takes wall time."""
        return nullcontext()

    def watch_launches(self, sink: Callable[[LaunchEvent], None]) -> AbstractContextManager[None]:
        """Nothing to watch: the driver reports no time per launch inside an ELF."""
        return nullcontext()


class TwinClock:
    """The twin: device time is modelled, and so is the host work the caller declares."""

    label = "twin (modelled)"

    def __init__(self) -> None:
        from npu_twin import timing
        from npu_twin.clock import default_clock

        self._clock = default_clock()
        self._host_op_us = timing.host_op_us
        self._null = nullcontext()

    def now(self) -> float:
        """Virtual seconds."""
        return self._clock.now()

    def host_op(self, name: str, *, nbytes: int = 0, flops: int = 0) -> AbstractContextManager[None]:
        """Advance the virtual clock by the modelled cost of the operation."""
        self._clock.advance_us(self._host_op_us(name, nbytes, flops))
        return self._null

    def watch_launches(self, sink: Callable[[LaunchEvent], None]) -> AbstractContextManager[None]:
        """Hand on the twin's trace of launches."""
        from npu_twin import trace

        def take(event: trace.TraceEvent) -> None:
            if event.kind == "launch":
                sink(LaunchEvent(event.program, event.launch, event.op, event.start_s, event.duration_s))

        return trace.subscribe(take)


def _open_twin() -> Driver:
    from npu_twin import pyxrt

    return Driver(TWIN, pyxrt, TwinClock.label, TwinClock())


def _open_npu2() -> Driver:
    try:
        module = importlib.import_module("pyxrt")
    except ImportError as error:
        raise DriverUnavailable(
            f"pyxrt cannot be imported ({error})",
            "Install XRT with its Python module and source its setup script; the module is built for the "
            "system's Python only, so run pytest with that interpreter",
        ) from error
    if not hasattr(module, "hw_context") or not hasattr(module, "ext"):
        raise DriverUnavailable(
            f"the imported pyxrt ({getattr(module, '__file__', 'built in')}) has no hw_context or no ext",
            "It is too old or another module of that name; XRT 2.18 or newer with the NPU plugin is needed",
        )
    try:
        count = int(module.enumerate_devices())
    except RuntimeError as error:
        raise DriverUnavailable(
            f"pyxrt cannot look for devices ({str(error).strip()})", "Unset XCL_EMULATION_MODE and check XRT"
        ) from error
    if count == 0:
        raise DriverUnavailable(
            "pyxrt sees no NPU device",
            "Check that the amdxdna driver is loaded (lsmod), that /dev/accel/accel0 exists and that "
            "xrt-smi examine lists the device",
        )
    try:
        module.device(0)  # opens the device node; no hardware context yet
    except RuntimeError as error:
        denied = "Permission denied" in str(error)
        raise DriverUnavailable(
            f"the NPU cannot be opened ({str(error).strip()})",
            "Add the user to the group that owns /dev/accel/accel0 (usually render) and log in again"
            if denied
            else "Reload the amdxdna driver and check that driver and XRT are of the same release",
        ) from error
    return Driver(NPU2, module, WallClock.label, WallClock())


@contextmanager
def timing_only() -> Iterator[Driver]:
    """A twin beside the driver of this process that walks programs without computing: for predictions."""
    from npu_twin import clock

    with clock.timing_only():
        yield _open_twin()


_OPENERS = {TWIN: _open_twin, NPU2: _open_npu2}
_current: Driver | None = None


def select(name: str) -> Driver:
    """Choose the driver of this process: `twin` or `npu2`.

    Raises DriverUnavailable (reason and remedy) when the device cannot be used, ValueError for
    another name.
    """
    global _current
    if name not in _OPENERS:
        raise ValueError(f"unknown device '{name}'; choose one of {', '.join(_OPENERS)}")
    if _current is None or _current.name != name:
        _current = _OPENERS[name]()
    return _current


def current() -> Driver:
    """Return the driver of this process; selects `$NPU_DEVICE` (default: the twin) on first use."""
    return _current if _current is not None else select(os.environ.get("NPU_DEVICE", TWIN))
