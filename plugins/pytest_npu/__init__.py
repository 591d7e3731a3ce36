"""pytest_npu: a pytest plugin that verifies LLM deployments on AMD's NPU2 or on its digital twin.

The plugin is inert until a test below a model folder (a folder with `verify_adapter.py`), a test that uses
its fixtures or markers, or one of its options asks for it. `pytest_npu.plugin` holds the hooks; its own hooks
are in `pytest_npu.newhooks`.
"""

from __future__ import annotations

from pytest_npu.core.exceptions import (
    DevicePoisoned,
    DeviceUnavailable,
    EventLogError,
    LedgerError,
    LockTimeout,
    NoCheckpoint,
    NotTakingPart,
    NpuPluginError,
    RecordError,
)

__all__ = [
    "DevicePoisoned",
    "DeviceUnavailable",
    "EventLogError",
    "LedgerError",
    "LockTimeout",
    "NoCheckpoint",
    "NotTakingPart",
    "NpuPluginError",
    "RecordError",
]
