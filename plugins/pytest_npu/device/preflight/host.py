"""Checks that concern the host: memory, memlock, the lock file, the software of the twin."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
from pathlib import Path

from pytest_npu.device.preflight.estimate import MemoryEstimate
from pytest_npu.device.preflight.machine import Machine
from pytest_npu.device.preflight.types import Finding, judged

GIB = 2**30


def memory(machine: Machine, need: MemoryEstimate | None) -> list[Finding]:
    """RAM against the model's estimate, and the CPUs."""
    cores = str(os.cpu_count() or "unknown")
    cpus = Finding("CPUs", "info", cores, "reference and twin run on them", scope="host")
    sizes = machine.memory()
    why = "weights exist in a prefill and a decode layout; the reference runs before or after the device"
    if sizes is None:
        return [cpus, Finding("RAM", "unknown", "/proc/meminfo is not readable", why, scope="host")]
    total, available = sizes
    text = f"{available / GIB:.1f} GiB available of {total / GIB:.1f} GiB"
    if need is None:
        return [cpus, Finding("RAM", "info", text, why, scope="host")]
    text += f"; {need.model} needs about {need.peak / GIB:.1f} GiB"
    remedy = "end other programs, or use a machine with more memory"
    data = {"available": available, "needed": need.peak}
    return [cpus, judged("RAM", available >= need.peak, text, why, remedy, scope="host", data=data)]


def memlock(machine: Machine, need: MemoryEstimate | None) -> Finding:
    """The limit of pinned memory, which buffer objects are made of."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    why = "buffer objects are pinned memory and count against it"
    remedy = (
        "set memlock to unlimited in /etc/security/limits.conf ('* - memlock unlimited') and log in again; "
        "check with ulimit -l"
    )
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock limit", "ok", "unlimited", why)
    text = f"{soft // 1024} KiB"
    if machine.may_lock_memory():
        return Finding("memlock limit", "ok", f"{text}, lifted by CAP_IPC_LOCK", why)
    if need is not None and soft >= need.device:
        return Finding("memlock limit", "ok", f"{text}; {need.model} pins {need.device // 1024} KiB", why)
    return Finding("memlock limit", "bad", text, why, remedy)


def lock_file(machine: Machine, path: Path) -> Finding:
    """The machine-wide NPU lock: can it be taken, and who has it."""
    why = "one process at a time works on the NPU; everybody locks the same file"
    holder = machine.lock_holder(path)
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        remedy = f"sudo chmod 666 {path}: another user made it for himself"
        return Finding("lock file", "bad", f"{path} cannot be opened", why, remedy)
    if not path.exists() and not os.access(path.parent, os.W_OK):
        remedy = f"create it as root (touch {path}; chmod 666 {path}), or name another with $NPU_LOCK_FILE"
        return Finding("lock file", "bad", f"{path} cannot be made", why, remedy)
    if holder is not None and holder.pid != os.getpid():
        remedy = "a run waits for it, 1800 s at most; end that process if it hangs"
        return Finding("lock file", "info", f"{path}, held by {holder.pid} ({holder.command})", why, remedy)
    return Finding("lock file", "ok", f"{path}, free", why)


def software() -> list[Finding]:
    """What the twin and the reference need; packages are looked up, not imported."""
    findings = []
    for package, why in (
        ("numpy", "host runtime and twin compute with it"),
        ("torch", "the Hugging Face reference and the twin's large products run on it"),
        ("transformers", "the Hugging Face reference"),
    ):
        present = importlib.util.find_spec(package) is not None
        try:
            version = importlib.metadata.version(package) if present else "missing"
        except importlib.metadata.PackageNotFoundError:
            version = "present, version unknown"
        remedy = f"pip install {package}, or pip install -e . in the project"
        scope = "host" if package == "numpy" else "twin"
        findings.append(judged(package, present, version, why, remedy, scope=scope))
    return findings
