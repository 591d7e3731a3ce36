"""The CPU and the limits on its instruction sets, by which bits of other libraries depend on the machine."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path

LIMITS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES",
    "NPU_KERNEL_ISA",
)
"""Environment variables that choose instructions."""


@lru_cache(maxsize=1)
def cpu_model() -> str:
    """Name, family, model and stepping of the CPU, as far as the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if not line.strip() and facts:
            break
        facts[name.strip()] = value.strip()
    name = facts.get("model name") or platform.machine()
    numbers = [facts[key] for key in ("cpu family", "model", "stepping") if key in facts]
    return f"{name} ({'/'.join(numbers)})" if numbers else name


def widest() -> str:
    """Widest vector instructions that the CPU has."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine()
    flags = next(
        (set(line.split()) for line in text.splitlines() if line.startswith(("flags", "Features"))), set()
    )
    for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sse4_2", "sve", "asimd"):
        if flag in flags:
            return flag
    return platform.machine()


def limits() -> dict[str, str]:
    """Variables of :data:`LIMITS` that are set."""
    return {name: os.environ[name] for name in LIMITS if os.environ.get(name)}


def described() -> str:
    """One line for a report: CPU, widest instructions, limits."""
    return "; ".join([cpu_model(), widest(), *(f"{name}={value}" for name, value in limits().items())])
