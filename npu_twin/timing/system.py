"""Time outside a program: buffer transfers, host operations, dispatch, context switch, wake-up."""

from __future__ import annotations

_SYNC_FIXED_US = 2.0
_WRITE_BYTES_PER_US = 16.0e3
_READ_BYTES_PER_US = 40.0e3
_HOST_FIXED_US = 20.0
_HOST_BYTES_PER_US = 8.0e3
_HOST_FLOPS_PER_US = 20.0e3
_DISPATCH_US = 100.0
_CONTEXT_SWITCH_US = 30.0
_IDLE_LIMIT_S = 10.0
_WAKE_US = 150.0e3


def sync_us(nbytes: int, to_device: bool) -> float:
    """Return the time to move `nbytes` between host and device copies of a buffer."""
    return _SYNC_FIXED_US + nbytes / (_WRITE_BYTES_PER_US if to_device else _READ_BYTES_PER_US)


def host_op_us(name: str, nbytes: int = 0, flops: int = 0) -> float:
    """Return the time of a host operation that touches `nbytes` and does `flops` operations."""
    return _HOST_FIXED_US + nbytes / _HOST_BYTES_PER_US + flops / _HOST_FLOPS_PER_US


def dispatch_us() -> float:
    """Return the host time between the start of a run and its first instruction on the device."""
    return _DISPATCH_US


def context_switch_us() -> float:
    """Return the time to switch between two hardware contexts of one process."""
    return _CONTEXT_SWITCH_US


def wake_us(idle_s: float) -> float:
    """Return what the first run after `idle_s` seconds without work pays for the device to wake up."""
    return _WAKE_US if idle_s > _IDLE_LIMIT_S else 0.0
