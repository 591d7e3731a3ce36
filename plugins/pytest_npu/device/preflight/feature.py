"""What is known about the machine before device work starts, and what is known to be bad.

The checks are those of `npu-deploy doctor` (`pytest_npu.device.preflight`), so both say the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_npu.core.constants import NPU2
from pytest_npu.device.driver import DeviceHolder

if TYPE_CHECKING:
    from pytest_npu.core.options import NpuOptions
    from pytest_npu.device.preflight import Finding

Fact = dict[str, Any]

#: Facts that must agree before times of two runs may be compared.
IDENTITY = ("driver", "firmware", "device type", "power mode", "XRT")

_OK = {"ok": True, "bad": False}


def fact(finding: Finding) -> Fact:
    """A finding of the doctor as a fact: `ok` is True, False, or None for what stops nothing."""
    ok = _OK.get(finding.status) if finding.scope != "twin" else None
    shown = finding.remedy if finding.status in ("bad", "warning") else ""
    return {"name": finding.name, "value": finding.value, "ok": ok, "remedy": shown, "why": finding.why}


def host_facts() -> list[Fact]:
    """CPUs and memory, for information: what a model needs is known when it is collected."""
    try:
        from pytest_npu.device.preflight import host
        from pytest_npu.device.preflight.machine import Machine
    except ImportError:
        return []
    return [{**fact(finding), "ok": None} for finding in host.memory(Machine(), None)]


def device_facts(lock: Path) -> list[Fact]:
    """Everything the doctor finds out about device, driver, XRT, limits, lock file and memory."""
    from pytest_npu.device import preflight

    return [fact(finding) for finding in preflight.examine(lock=lock).findings if finding.scope != "twin"]


def model_facts(folder: Path, phases: set[int], kernels: list[Any], options: NpuOptions) -> list[Fact]:
    """Memory and compiled artefacts of a model folder of this project; nothing for other folders.

    `phases` and `kernels` (cases of phase 1) are those of the selected tests.
    """
    from pytest_npu.device import preflight
    from pytest_npu.device.preflight import artefacts

    wanted = artefacts.request(folder, phases, kernels, checkpoint=options.checkpoint, choice=options.model)
    return [fact(finding) for finding in preflight.examine_model(folder, wanted)]


def refuse_bad(facts: list[Fact]) -> None:
    """Raise pytest.UsageError naming every fact that is known to be bad, with its remedy."""
    bad = [fact for fact in facts if fact["ok"] is False]
    if bad:
        lines = "\n".join(f"  {fact['name']}: {fact['value']}. Remedy: {fact['remedy']}" for fact in bad)
        raise pytest.UsageError(f"--npu: the machine is not ready for device work:\n{lines}")


def run_preflight(config: pytest.Config, device: DeviceHolder) -> list[Fact]:
    """Collect the facts of all plugins.

    Raises pytest.UsageError when `--npu` meets one that is known to be bad.
    """
    answers = config.hook.pytest_npu_preflight(config=config, device=device.opened)
    facts = [fact for answer in answers if answer for fact in answer]
    device.identity = {fact["name"]: str(fact["value"]) for fact in facts if fact["name"] in IDENTITY}
    if device.name == NPU2:
        refuse_bad(facts)
    return facts
