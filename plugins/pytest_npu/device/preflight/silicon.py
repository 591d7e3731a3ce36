"""Checks of the NPU, its driver and XRT. Each returns findings; none opens a hardware context."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from pytest_npu.device.preflight.machine import Machine, Npu
from pytest_npu.device.preflight.types import Finding, Status, judged

TARGET = "NPU2"
#: The host runtime is held against this release (`make conformance`).
TESTED_XRT = "2.25"
#: First release with full-ELF contexts and the `ext` names in pyxrt.
OLDEST_XRT = (2, 18)


EMULATION = "XCL_EMULATION_MODE"
#: Part of what XRT says when the device does not open -> what helps; the last one fits all.
_OPENING = {
    "err=-13": "the user may not open the node: see the finding on access",
    "err=-25": "the node answers to another driver than amdxdna: ls -l /sys/class/accel/*/device/driver "
    "shows which; unload it and load amdxdna",
    "err=-12": "no memory to pin: raise the memlock limit, end other programs that hold the device",
    "err=-16": "the device is taken: see the finding on other holders",
    "err=-19": "the device went away: look at dmesg, then reload the amdxdna driver or reboot",
    "": "reload the amdxdna driver (modprobe -r amdxdna; modprobe amdxdna) and look at dmesg for its reason",
}


def device(machine: Machine, npus: list[Npu]) -> list[Finding]:
    """NPU on the bus, generation, kernel module, device node, permission."""
    why = "without an NPU of the second generation nothing can be measured"
    if not npus:
        bios = "enable the NPU (IPU) in the BIOS setup, or use a machine with a Ryzen AI 300 or newer"
        return [Finding("NPU", "bad", "no AMD NPU on the PCI bus", why, bios), *_module(machine)]
    npu = npus[0]
    text = f"{npu.name or 'unnamed'} at {npu.bdf} (PCI {npu.device}, revision {npu.revision or 'unknown'})"
    findings = [Finding("NPU", "ok", text, why, data={"count": len(npus)})]
    differ = f"programs are built for {TARGET} (AIE2P): tile counts and instructions of another one differ"
    machines = f"build and run on a {TARGET} machine (Strix, Strix Halo, Krackan)"
    right = npu.generation == TARGET
    findings.append(judged("NPU generation", right, npu.generation, differ, machines))
    findings += _module(machine)
    if npu.name:
        findings.append(Finding("device type", "info", npu.name, "times of different NPUs do not compare"))
    findings.append(_firmware(npu))
    findings.append(_access(npu))
    return findings


def _module(machine: Machine) -> list[Finding]:
    version = machine.module_version()
    why = "the kernel driver gives access to the NPU"
    remedy = f"modprobe amdxdna (kernel {machine.kernel()}; in mainline since 6.14)"
    text = "amdxdna is not loaded" if version is None else f"amdxdna {version}"
    return [judged("driver", version is not None, text, why, remedy, data={"version": version})]


def _firmware(npu: Npu) -> Finding:
    return Finding(
        "firmware",
        "info" if npu.firmware else "unknown",
        npu.firmware or "the driver does not state it",
        "driver and firmware must be of one release; times compare only under the same firmware",
    )


def _access(npu: Npu) -> Finding:
    why = "the user driver opens this node for reading and writing"
    if npu.node is None:
        remedy = "reload the driver (modprobe -r amdxdna; modprobe amdxdna) and look at dmesg for its reason"
        return Finding("access", "bad", "no device node /dev/accel/accel* for the NPU", why, remedy)
    usable = os.access(npu.node, os.R_OK | os.W_OK)
    text = f"{npu.node} {'readable and writable' if usable else 'not accessible'}"
    return judged("access", usable, text, why, _let_in(npu.node))


def _let_in(node: Path) -> str:
    """How a user gets at a node: by its group where that may read and write, else by a rule for all nodes."""
    try:
        group, mode = node.group(), node.stat().st_mode
    except (OSError, KeyError):
        group, mode = "root", 0
    if group != "root" and mode & 0o060 == 0o060:
        return f"sudo usermod -aG {group} $USER, then log in again"
    return (
        f'{node} is for {group} alone: put SUBSYSTEM=="accel", GROUP="render", MODE="0660" into '
        "/etc/udev/rules.d/99-amdxdna.rules, reload the driver, sudo usermod -aG render $USER, log in again"
    )


def xrt(machine: Machine, npus: list[Npu], answer: dict[str, Any], smi: dict[str, str]) -> list[Finding]:
    """pyxrt, its version against the driver's, and whether it sees the NPU."""
    findings = [_pyxrt(machine, answer), _version(answer, smi)]
    module = machine.module_version()
    library = _release(str(answer.get("library") or smi.get("xrt", "")))
    if module and library and (release := _release(module)) and release[:2] != library[:2]:
        findings.append(
            Finding(
                "driver and XRT",
                "warning",
                f"driver {module}, XRT {_dotted(library)}",
                "user and kernel part of the driver are released together",
                "install the amdxdna driver package of the same XRT release",
            )
        )
    if "file" in answer:
        findings.append(_seen(machine, npus, answer))
    return findings


def _pyxrt(machine: Machine, answer: dict[str, Any]) -> Finding:
    why = "the host runtime reaches the NPU through AMD's Python module"
    name = f"pyxrt for Python {answer.get('python', '?')}"
    if "file" not in answer:
        remedy = (
            f"install XRT {TESTED_XRT} with its Python module (Debian: python3-xrt) and run with the "
            f"system's Python, which {machine.python} may not be"
        )
        elsewhere = machine.pyxrt_files()
        if elsewhere:
            remedy = (
                f"{elsewhere[0]} is there, but not for this interpreter: run with the system's Python it was "
                "built for (a virtual environment with --system-site-packages will do), or source XRT's "
                "setup script"
            )
        text = f"{name}: {answer.get('error', 'not importable')}"
        return Finding("pyxrt", "bad", text, why, remedy, data={"elsewhere": [str(p) for p in elsewhere]})
    if not answer.get("complete", True):
        remedy = f"install XRT {TESTED_XRT} with the NPU driver; another module may hide it"
        return Finding("pyxrt", "bad", f"{answer['file']} has no hw_context or no ext", why, remedy)
    return Finding("pyxrt", "ok", str(answer["file"]), why)


def _version(answer: dict[str, Any], smi: dict[str, str]) -> Finding:
    release = _release(str(answer.get("library") or smi.get("xrt", "")))
    why = f"the host runtime is held against XRT {TESTED_XRT}"
    if release is None:
        return Finding("XRT", "unknown", "no XRT library found", why)
    text = _dotted(release)
    status: Status = "ok"
    remedy = ""
    if release[:2] < OLDEST_XRT:
        status, remedy = "bad", f"install XRT {TESTED_XRT}: this release has no full-ELF contexts"
    elif text != TESTED_XRT and not text.startswith(TESTED_XRT + "."):
        status, remedy = "warning", f"expect differences in error texts; tested with XRT {TESTED_XRT}"
    return Finding("XRT", status, text, why, remedy)


def _seen(machine: Machine, npus: list[Npu], answer: dict[str, Any]) -> Finding:
    why = "what pyxrt opens is what the programs run on"
    emulated = machine.env.get(EMULATION)
    if emulated is not None:
        text = f"{EMULATION}={emulated} makes XRT look for an emulation, not for the NPU"
        return Finding("device opens", "bad", text, why, f"unset {EMULATION}")
    error = answer.get("error")
    if error:
        remedy = next((help for part, help in _OPENING.items() if part in str(error)), _OPENING[""])
        return Finding("device opens", "bad", str(error), why, remedy)
    if not answer["devices"]:
        remedy = (
            "see the findings on NPU, driver and access"
            if not npus
            else "XRT lacks its NPU driver (libxrt-npu2)"
        )
        return Finding("device opens", "bad", "pyxrt sees no device", why, remedy)
    return Finding("device opens", "ok", f"{answer.get('name') or 'unnamed'} ({answer.get('bdf', '?')})", why)


def power(answer: dict[str, Any], smi: dict[str, str]) -> Finding:
    """The power mode, which decides about clock rates."""
    mode = smi.get("power mode")
    try:
        platform = json.loads(answer.get("platform") or "{}")["platforms"][0]
        mode = mode or str(platform["status"]["power_mode"])
    except (ValueError, KeyError, IndexError):
        pass
    why = "clock rates follow it; times of different modes do not compare"
    if mode is None:
        return Finding("power mode", "unknown", "neither xrt-smi nor pyxrt states it", why)
    slow = mode.lower() in ("powersaver", "power saver", "balanced")
    remedy = "xrt-smi configure --pmode performance, before any measurement"
    return Finding("power mode", "warning" if slow else "info", mode, why, remedy if slow else "")


def holders(machine: Machine, npus: list[Npu]) -> list[Finding]:
    """Who else has the device open."""
    nodes = [npu.node for npu in npus if npu.node is not None]
    if not nodes:
        return []
    others = [holder for node in nodes for holder in machine.holders(node)]
    why = "contexts of other processes share columns and memory with ours, and spoil times"
    if not others:
        limited = "" if os.geteuid() == 0 else " that this user may see"
        return [Finding("other holders", "ok", f"no other process{limited}", why)]
    text = "; ".join(f"{holder.pid} ({holder.command})" for holder in others)
    remedy = "end them, or make them use the same lock (flock)"
    return [Finding("other holders", "warning", text, why, remedy, data={"pids": [h.pid for h in others]})]


def _release(text: str) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in match.groups() if part is not None) if match else None


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
