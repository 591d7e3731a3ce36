"""Failures that go away by themselves, by name. Nothing else is ever run again.

Numbers that do not agree are not in this list and never will be: a gate that passes on the second try has
failed.
"""

from __future__ import annotations

import pytest

#: The driver refuses a hardware context while another process still closes its own (XRT 2.25.0, amdxdna).
TRANSIENT = (
    r"DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed \(err=-16\): Device or resource busy",
    r"DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed \(err=-11\): Resource temporarily unavailable",
)
MAX_RETRIES = 2


def allow_retries(item: pytest.Item) -> None:
    """Let pytest-rerunfailures repeat a device test that failed with one of the named signatures.

    A test with its own `flaky` mark keeps it; without the plugin nothing is repeated.
    """
    manager = item.config.pluginmanager
    present = manager.has_plugin("rerunfailures") or manager.has_plugin("pytest_rerunfailures")
    if present and item.get_closest_marker("flaky") is None:
        item.add_marker(pytest.mark.flaky(reruns=MAX_RETRIES, only_rerun=list(TRANSIENT)))
