"""Errors of the plugin.

NpuPluginError
├── DeviceUnavailable   the requested device cannot be used: reason and remedy
├── DevicePoisoned      the device failed earlier in this run; nothing it says can be trusted
├── LockTimeout         the NPU lock was not free within the limit: names the holder
├── NotTakingPart       a fixture of the plugin is used by a test that did not ask for it in time
├── LedgerError         a gate ledger cannot be read or written, or no verdict can be bound to its code
│   └── NoCheckpoint    there are no usable weights to bind a verdict to
├── EventLogError       an event log that is not ours, or of another schema version
└── RecordError         a record payload that is not JSON
"""

from __future__ import annotations

from pathlib import Path


class NpuPluginError(Exception):
    """Base of every error of the plugin."""


class DeviceUnavailable(NpuPluginError):
    """The requested device cannot be used.

    Attributes: `reason` (what is missing) and `remedy` (what to do about it).
    """

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{reason}. {remedy}")


class DevicePoisoned(NpuPluginError):
    """The device failed earlier in this run, so it is not touched again."""

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(
            f"the device is not used any more in this run: {cause}. Reset the NPU (reload the driver or "
            "reboot) and start a new run"
        )


class LockTimeout(NpuPluginError):
    """The NPU lock did not become free in time.

    Attributes: `path`, `waited_s` (seconds) and `holder` (a description of the process that has it).
    """

    def __init__(self, path: Path, waited_s: float, holder: str) -> None:
        self.path = path
        self.waited_s = waited_s
        self.holder = holder
        super().__init__(
            f"the NPU lock {path} was not free within {waited_s:.1f} s; held by {holder}. "
            "Wait for that process or end it; the limit is --npu-lock-timeout SECONDS"
        )


class NotTakingPart(NpuPluginError):
    """The plugin takes no part in this run, as no collected test asked for it."""

    def __init__(self) -> None:
        super().__init__(
            "pytest_npu takes no part in this run: no collected test is below a model folder, has a phase "
            "marker or names one of its fixtures. A test that gets a fixture by request.getfixturevalue has "
            "to say so: @pytest.mark.usefixtures('npu_device')"
        )


class LedgerError(NpuPluginError):
    """A gate ledger cannot be read or written, or nothing says what a verdict would be about."""


class NoCheckpoint(LedgerError):
    """The weights that a verdict would be about are missing, torn or contradictory."""


class EventLogError(NpuPluginError):
    """A file is not an event log of this plugin, or has a schema version this release cannot read."""


class RecordError(NpuPluginError):
    """A record payload holds something that JSON cannot carry."""
