"""All checks in one report, and its text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_npu.core.constants import ADAPTER_FILE, DEFAULT_LOCK_FILE, LOCK_FILE_ENV
from pytest_npu.device.preflight import artefacts, host, silicon
from pytest_npu.device.preflight.estimate import MemoryEstimate, estimate
from pytest_npu.device.preflight.machine import Machine
from pytest_npu.device.preflight.types import Finding, Report

if TYPE_CHECKING:
    from llms.verify.contract.abilities.artefacts import ArtefactRequest

_MARKS = {"ok": "ok", "bad": "BAD", "warning": "warn", "info": "info", "unknown": "?"}
_TITLES = {"silicon": "Silicon", "host": "Host", "twin": "Digital twin and reference"}


def examine(machine: Machine | None = None, *, model: str | None = None, lock: Path | None = None) -> Report:
    """Run every check on a machine (default: this one), with a model's memory and artefacts when given.

    Raises LookupError for an unknown model, or one whose adapter cannot be imported.
    """
    machine = machine if machine is not None else Machine()
    adapter, need = _model(model)
    npus = machine.npus()
    answer, smi = machine.pyxrt(), machine.xrt_smi()
    findings = [
        *silicon.device(machine, npus),
        *silicon.xrt(machine, npus, answer, smi),
        silicon.power(answer, smi),
        *silicon.holders(machine, npus),
        host.memlock(machine, need),
        host.lock_file(machine, lock or Path(os.environ.get(LOCK_FILE_ENV) or DEFAULT_LOCK_FILE)),
    ]
    if model is not None and adapter is not None:
        compiled = artefacts.check(model, adapter)
        findings += [compiled] if compiled is not None else []
    findings += [*host.memory(machine, need), *host.software()]
    return Report(tuple(findings))


def _model(model: str | None) -> tuple[Any, MemoryEstimate | None]:
    if model is None:
        return None, None
    from llms.verify.contract.deployment import DeploymentError, load_adapter
    from llms.verify.contract.models import find_model

    try:
        adapter = load_adapter(find_model(model).folder)
    except DeploymentError as error:
        raise LookupError(str(error)) from error
    return adapter, estimate(model, adapter.CONFIG)


def examine_model(folder: Path, wanted: ArtefactRequest | None = None) -> tuple[Finding, ...]:
    """Memory and artefacts of one model folder; empty for another folder, or a broken one."""
    from llms.verify.contract.models import ROOT

    if folder.resolve().parent != ROOT or not (folder / ADAPTER_FILE).is_file():
        return ()
    try:
        adapter, need = _model(folder.name)
    except LookupError:
        return ()  # the gates say what is wrong with it
    if wanted is not None and wanted.config is not None:
        need = estimate(folder.name, wanted.config)
    compiled = artefacts.check(folder.name, adapter, wanted)
    ram = [finding for finding in host.memory(Machine(), need) if finding.name == "RAM"]
    return (*([compiled] if compiled is not None else []), *ram)


def command(model: str | None, *, as_json: bool, npu: bool) -> tuple[str, int]:
    """What `npu-deploy doctor` prints, and its exit code.

    0: work is possible here; 1: not even on the twin; 2: unknown model; 4: `npu` was asked for and the NPU
    is not ready.
    """
    try:
        report = examine(model=model)
    except LookupError as error:
        return f"error: {error}", 2
    text = json.dumps(report.as_json(), indent=1) if as_json else render(report)
    if npu and report.blocking:
        return text, 4
    return text, 1 if report.twin_blocking and report.blocking else 0


def render(report: Report) -> str:
    """Text for a terminal: a verdict for silicon and twin, then every finding with reason and remedy."""
    lines = [_verdict(report)]
    for scope, title in _TITLES.items():
        findings = [finding for finding in report.findings if finding.scope == scope]
        if findings:
            lines += ["", title]
            lines += [line for finding in findings for line in _lines(finding)]
    return "\n".join(lines)


def _verdict(report: Report) -> str:
    sides = {"NPU (--npu)": report.blocking, "digital twin (default)": report.twin_blocking}
    return "\n".join(
        f"{name}: not usable: {', '.join(f.name for f in blocking)}" if blocking else f"{name}: ready"
        for name, blocking in sides.items()
    )


def _lines(finding: Finding) -> list[str]:
    lines = [f"  {_MARKS[finding.status]:>4}  {finding.name}: {finding.value}"]
    if finding.status in ("bad", "warning"):
        lines.append(f"        why: {finding.why}")
    if finding.remedy:
        lines.append(f"        remedy: {finding.remedy}")
    return lines
