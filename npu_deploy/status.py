"""`npu-deploy status`: the last verdict of every phase and whether it still holds."""

from __future__ import annotations

from typing import Any

from pytest_npu.ledger import store as ledger

from llms.llama_kernel_builder.deployment import describe
from llms.verify.contract.models import ModelFolder
from npu_deploy import folders
from npu_deploy.answer import Answer
from npu_deploy.errors import ledger_errors


def status_of(model: str | None) -> Answer:
    """Status of one model or of all. Raises DeployError for an unknown model."""
    models = [folders.find(model)] if model is not None else folders.all_models()
    rows = [model_status(one) for one in models]
    lines: list[str] = []
    for row in rows:
        lines += [*_lines(row), ""]
    return Answer({"models": rows}, tuple(lines[:-1]))


def model_status(model: ModelFolder) -> dict[str, Any]:
    """Verdicts with their state: `holds`, `stale` (what it judged has changed), `out of order`, `not run`."""
    from pytest_npu.core.constants import PHASES
    from pytest_npu.core.exceptions import LedgerError

    from llms.llama_kernel_builder.device_config import deviations
    from llms.llama_kernel_builder.model_config import ModelConfig

    with ledger_errors():
        entries = ledger.read(ledger.path_of(model))
    last = ledger.last_by_phase(entries)
    identity: ledger.Identity | None = None
    problem = ""
    extra: dict[str, Any] = {}
    try:
        deployment = ledger.open_deployment(model, None, None)
        identity = ledger.identity_of(deployment)
        config = deployment.config()
        extra = {"checkpoint": deployment.checkpoint.label}
        if isinstance(config, ModelConfig):
            share = describe.share(config)
            extra |= {"deviations": deviations(config), "share": share.as_dict(), "share_text": str(share)}
    except LedgerError as error:
        problem = str(error)
    phases = []
    for number, title in PHASES.items():
        entry = last.get(number)
        row: dict[str, Any] = {"phase": number, "title": title, "verdict": None, "state": "not run"}
        if entry is not None:
            row |= {
                "verdict": entry.verdict,
                "device": entry.device,
                "checkpoint": entry.checkpoint,
                "date": entry.date,
                "run": entry.run,
                "hash": entry.hash,
                "state": "holds",
            }
            changed = identity.differences(entry.parts) if identity is not None else []
            if identity is None:
                row["state"] = "unknown"
            elif changed:
                row |= {"state": "stale", "changed": changed}
            elif not _in_order(entries, entry):
                row["state"] = "out of order"
        phases.append(row)
    return {
        "model": model.name,
        "folder": str(model.folder),
        "hash": identity.hash if identity is not None else None,
        "problem": problem,
        "phases": phases,
        **extra,
    }


def _in_order(entries: list[ledger.Entry], entry: ledger.Entry) -> bool:
    """Whether the phase before had a PASS for the same hash when this verdict was made."""
    if entry.phase == 0:
        return True
    before = None
    for candidate in entries:
        if candidate.phase == entry.phase - 1 and candidate.hash == entry.hash:
            before = candidate
        if candidate is entry:
            break
    return before is not None and before.verdict == ledger.PASS


def _lines(row: dict[str, Any]) -> list[str]:
    lines = [f"{row['model']}  ({row['hash'] or 'hash unknown'})"]
    if row["problem"]:
        lines.append(f"  {row['problem']}")
    for phase in row["phases"]:
        state = phase["state"]
        if state == "stale":
            state += f" ({', '.join(phase['changed'])} changed)"
        where = f"{phase.get('device', '')}, {phase.get('date', '')}" if phase["verdict"] else ""
        head = f"  phase {phase['phase']} {phase['title']:11} {phase['verdict'] or '-':11} {state:24} {where}"
        lines.append(head.rstrip())
    lines += [f"  deviation: {line}" for line in row.get("deviations") or ()]
    return lines + [f"  {row['share_text']}"] * ("share_text" in row)
