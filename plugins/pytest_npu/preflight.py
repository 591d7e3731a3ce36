"""What is known about the machine before device work starts, and what is known to be bad."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from .constants import NPU2
from .device import DeviceHolder

Fact = dict[str, Any]

_ACCEL = Path("/sys/class/accel")
_MODULE = Path("/sys/module/amdxdna")
#: Facts that must agree before times of two runs may be compared.
IDENTITY = ("driver", "firmware", "device type")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _fact(name: str, value: str, ok: bool | None = None, remedy: str = "") -> Fact:
    return {"name": name, "value": value, "ok": ok, "remedy": remedy}


def host_facts() -> list[Fact]:
    """CPU count and memory: for information, no limit is known to hold for every model."""
    facts = [_fact("CPUs", str(os.cpu_count() or "unknown"))]
    meminfo = _read(Path("/proc/meminfo")) or ""
    available = next(
        (line.split()[1] for line in meminfo.splitlines() if line.startswith("MemAvailable")), None
    )
    if available is not None:
        facts.append(_fact("RAM available", f"{int(available) / 2**20:.1f} GiB"))
    return facts


def device_facts() -> list[Fact]:
    """Driver, firmware, access and limits of the NPU, from the sysfs attributes of the amdxdna driver."""
    facts = []
    version = _read(_MODULE / "version") or _read(_MODULE / "srcversion")
    loaded = _MODULE.is_dir()
    remedy = "load the driver: modprobe amdxdna"
    facts.append(
        _fact("driver", f"amdxdna {version or 'version unknown'}" if loaded else "not loaded", loaded, remedy)
    )
    for accel in sorted(_ACCEL.glob("accel*")):
        for name, attribute in (("device type", "vbnv"), ("firmware", "fw_version")):
            value = _read(accel / "device" / attribute)
            if value is not None:
                facts.append(_fact(name, value))
        node = Path("/dev/accel") / accel.name
        usable = os.access(node, os.R_OK | os.W_OK)
        remedy = f"add the user to the group that owns {node} (usually render) and log in again"
        facts.append(
            _fact(
                "access", f"{node} {'readable and writable' if usable else 'not accessible'}", usable, remedy
            )
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    text = "unlimited" if unlimited else f"{soft // 1024} KiB"
    remedy = (
        "buffers are pinned memory: set memlock to unlimited in /etc/security/limits.conf and log in again"
    )
    facts.append(_fact("memlock limit", text, unlimited, remedy))
    return facts


def run_preflight(config: pytest.Config, device: DeviceHolder) -> list[Fact]:
    """Collect the facts of all plugins.

    Raises pytest.UsageError when `--npu` meets one that is known to be bad.
    """
    answers = config.hook.pytest_npu_preflight(config=config, device=device.opened)
    facts = [fact for answer in answers if answer for fact in answer]
    device.identity = {fact["name"]: str(fact["value"]) for fact in facts if fact["name"] in IDENTITY}
    bad = [fact for fact in facts if fact["ok"] is False]
    if bad and device.name == NPU2:
        lines = "\n".join(f"  {fact['name']}: {fact['value']}. Remedy: {fact['remedy']}" for fact in bad)
        raise pytest.UsageError(f"--npu: the machine is not ready for device work:\n{lines}")
    return facts
