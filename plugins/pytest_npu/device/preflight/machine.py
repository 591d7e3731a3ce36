"""What a machine says about itself: sysfs, procfs, device nodes, pyxrt and xrt-smi. No judgement here.

Attributes of the amdxdna driver: `vbnv` (name of the NPU), `fw_version`; PCI identities: the driver's own
table (0x1502 first generation, 0x17f0 second). Folders can be moved, so that tests bring a machine of their
own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AMD = "0x1022"
GENERATIONS = {"0x1502": "NPU1", "0x17f0": "NPU2"}
PROBE_LIMIT_S = 30
CAP_IPC_LOCK = 14

# Runs in a process of its own: a broken driver may crash or hang, the doctor must not.
_PROBE = r"""
import json, re, sys
answer = {"python": sys.version.split()[0]}
try:
    import pyxrt
    answer["file"] = getattr(pyxrt, "__file__", "built in")
    maps = open("/proc/self/maps").read()
    library = re.search(r"libxrt_coreutil\.so\.([0-9.]+)", maps)
    answer["library"] = library.group(1) if library else ""
    answer["complete"] = hasattr(pyxrt, "hw_context") and hasattr(pyxrt, "ext")
    print(json.dumps(answer), flush=True)  # the next call may end the process
    answer["devices"] = int(pyxrt.enumerate_devices())
    if answer["devices"]:
        device = pyxrt.device(0)
        for name in ("name", "bdf", "host", "platform"):
            try:
                answer[name] = device.get_info(getattr(pyxrt.xrt_info_device, name))
            except Exception as error:
                answer[name] = ""
except Exception as error:
    answer["error"] = f"{type(error).__name__}: {error}".strip()
print(json.dumps(answer))
"""


def read(path: Path) -> str | None:
    """Content of a small file without surrounding space, None when there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


@dataclass(frozen=True)
class Npu:
    """One NPU as sysfs shows it. `node` is None when there is no device node for it."""

    bdf: str
    device: str
    revision: str
    name: str | None
    firmware: str | None
    driver: str | None
    node: Path | None

    @property
    def generation(self) -> str:
        """`NPU1`, `NPU2`, or `unknown (<pci id>)`."""
        return GENERATIONS.get(self.device, f"unknown ({self.device})")


@dataclass(frozen=True)
class Holder:
    """A process that has the device open."""

    pid: int
    command: str


@dataclass(frozen=True)
class Machine:
    """Where to look. The defaults are this machine."""

    sysfs: Path = Path("/sys")
    devfs: Path = Path("/dev")
    procfs: Path = Path("/proc")
    root: Path = Path("/")
    python: str = sys.executable
    smi: str = "xrt-smi"
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def npus(self) -> list[Npu]:
        """AMD NPUs on the PCI bus, whether a driver is bound or not."""
        npus = []
        for entry in sorted((self.sysfs / "bus/pci/devices").glob("*")):
            device = read(entry / "device") or ""
            accel = sorted(entry.glob("accel/accel*"))
            bound = entry / "driver"
            driver = bound.resolve().name if bound.exists() else ("amdxdna" if accel else None)
            if read(entry / "vendor") != AMD or (device not in GENERATIONS and driver != "amdxdna"):
                continue
            node = self.devfs / "accel" / accel[0].name if accel else None
            npus.append(
                Npu(
                    bdf=entry.name,
                    device=device,
                    revision=read(entry / "revision") or "",
                    name=read(entry / "vbnv"),
                    firmware=read(entry / "fw_version"),
                    driver=driver,
                    node=node if node is not None and node.exists() else None,
                )
            )
        return npus

    def module_version(self) -> str | None:
        """Version of the loaded amdxdna module; `in-kernel` when it states none, None when not loaded."""
        folder = self.sysfs / "module/amdxdna"
        if not folder.is_dir():
            return None
        return read(folder / "version") or "in-kernel"

    def kernel(self) -> str:
        """Release of the Linux kernel."""
        return read(self.procfs / "sys/kernel/osrelease") or "unknown"

    def memory(self) -> tuple[int, int] | None:
        """Bytes of RAM, total and available."""
        text = read(self.procfs / "meminfo") or ""
        sizes = {m[1]: int(m[2]) * 1024 for m in re.finditer(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
        try:
            return sizes["MemTotal"], sizes["MemAvailable"]
        except KeyError:
            return None

    def may_lock_memory(self) -> bool:
        """Whether this process has CAP_IPC_LOCK, which lifts the memlock limit."""
        mask = re.search(r"^CapEff:\s+([0-9a-f]+)", read(self.procfs / "self/status") or "", re.MULTILINE)
        return bool(mask and int(mask[1], 16) >> CAP_IPC_LOCK & 1)

    def holders(self, node: Path) -> list[Holder]:
        """Other processes that have a device node open, as far as this user may see them."""
        own = {os.getpid(), os.getppid()}
        return [Holder(pid, self._command(pid)) for pid in self._pids_with(node) if pid not in own]

    def _pids_with(self, node: Path) -> Iterator[int]:
        for folder in sorted(self.procfs.glob("[0-9]*")):
            try:
                links = [str(link.readlink()) for link in (folder / "fd").iterdir()]
            except OSError:
                continue
            if str(node) in links:
                yield int(folder.name)

    def _command(self, pid: int) -> str:
        text = read(self.procfs / str(pid) / "cmdline") or read(self.procfs / str(pid) / "comm") or "?"
        return text.replace("\0", " ").strip()[:120]

    def lock_holder(self, path: Path) -> Holder | None:
        """The process that holds an exclusive lock on a file, from the kernel's lock table."""
        try:
            inode = path.stat().st_ino
        except OSError:
            return None
        for line in (read(self.procfs / "locks") or "").splitlines():
            parts = line.split()
            taken = len(parts) > 5 and "->" not in parts and parts[3] == "WRITE"
            if taken and parts[5].rsplit(":", 1)[-1] == str(inode):
                pid = int(parts[4])
                return Holder(pid, self._command(pid))
        return None

    def pyxrt_files(self) -> list[Path]:
        """Where pyxrt is installed for other interpreters: distribution packages and AMD's own installer."""
        places = ("usr/lib/python3*/dist-packages", "usr/lib/python3*/site-packages", "opt/xilinx/xrt/python")
        return sorted(file for place in places for file in self.root.glob(f"{place}/pyxrt*.so"))

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_LIMIT_S,
            env=self.env,
            check=False,
        )

    def pyxrt(self) -> dict[str, Any]:
        """What importing pyxrt and asking its first device gives; `error` when something failed."""
        try:
            done = self._run(self.python, "-c", _PROBE)
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": f"asking pyxrt did not end: {error}"}
        problem = f"the process that asked pyxrt ended with code {done.returncode}"
        try:
            answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            return {"error": problem}
        return answer if done.returncode == 0 else {**answer, "error": problem}

    def xrt_smi(self) -> dict[str, str]:
        """XRT version, firmware and power mode as `xrt-smi examine` prints them; empty without the tool."""
        path = shutil.which(self.smi, path=self.env.get("PATH"))
        if path is None:
            return {}
        answer = {"path": path}
        keys = {
            "Version": "xrt",
            "amdxdna Version": "driver",
            "NPU Firmware Version": "firmware",
            "Power Mode": "power mode",
        }
        for report in ([], ["--report", "platform"]):
            try:
                done = self._run(path, "examine", *report)
            except (OSError, subprocess.TimeoutExpired):
                continue
            for line in done.stdout.splitlines():
                name, colon, value = line.partition(" : ")
                key = keys.get(name.strip())
                if colon and key and key not in answer:
                    answer[key] = value.strip()
        return answer
