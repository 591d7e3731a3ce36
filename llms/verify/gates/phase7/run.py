"""One audit from end to end, in the process that it is called in."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llms.verify.contract.abilities import NotOffered, offered
from llms.verify.gates.phase7.types import Audit, AuditRequest, Setting

if TYPE_CHECKING:
    from llms.verify.contract.chat import EncodedPrompt
    from llms.verify.contract.deployment import Deployment
    from llms.verify.gates.phase7.gates import ReferenceRuns
    from llms.verify.gates.phase7.integrity import Snapshot


def run_audit(request: AuditRequest, setting: Setting) -> Audit:
    """Audit a model folder.

    The reference runs of earlier sessions are not used. On silicon whoever calls this holds the device from
    the first to the last question. Raises DeploymentError, CheckpointError, and whatever the adapter raises
    that cannot be opened.
    """
    from llms.verify.contract.deployment import load_adapter
    from llms.verify.gates.phase7.integrity import Snapshot
    from llms.verify.reference.matched_model import FAMILIES

    begin = time.monotonic()
    # before any code of the model has run
    shipped = Snapshot.take(setting, FAMILIES)
    audit = _ask(request, setting, load_adapter(request.folder), shipped)
    audit.seconds = time.monotonic() - begin
    audit.date = time.strftime("%Y-%m-%d %H:%M")
    return audit


def _ask(request: AuditRequest, setting: Setting, adapter: Any, shipped: Snapshot) -> Audit:
    from llms.verify.contract.deployment import Deployment
    from llms.verify.gates.phase7 import checks, gates

    def reopen() -> Deployment:
        return Deployment.from_folder(
            request.folder, checkpoint=request.checkpoint, model_choice=request.choice, use_cache=False
        )

    opened = reopen()
    source = opened.checkpoint
    audit = Audit(
        model=opened.name,
        device=setting.device,
        checkpoint={"label": source.label, "kind": source.kind, "content_hash": source.content_hash},
        environment=_environment(),
        command=request.command(),
    )
    checks.check_judge(audit, request.folder)
    checks.check_thresholds(audit, opened.reference_checkpoint)
    prompts = opened.prompts(request.prompts)
    try:
        known = _ask_watched(audit, request, setting, adapter, shipped, opened, prompts)
    except NotOffered as error:
        audit.add("production", "Does the runner call the model's production functions?", [str(error)], "")
        return audit
    if audit.ok:
        gates.check_faults(audit, reopen, known, prompts[0], setting.plant)
        if request.ladder:
            gates.check_ladder(audit, opened, known, (*prompts, opened.encode(checks.made_up_text())))
    else:
        note = "not asked: an earlier question failed already"
        audit.add("faults", "Do the gates fail when the deployment is wrong?", [note], "", warn=True)
    if source.kind == "tiny":
        audit.add(
            "checkpoint",
            "Is it the published checkpoint?",
            [f"no, a stand-in: {source.label}; its verdict speaks of the code, not of the model's quality"],
            "",
            warn=True,
        )
    opened.release_runners()
    return audit


def _ask_watched(
    audit: Audit,
    request: AuditRequest,
    setting: Setting,
    adapter: Any,
    shipped: Snapshot,
    opened: Deployment,
    prompts: tuple[EncodedPrompt, ...],
) -> ReferenceRuns:
    """The questions whose answers show in the calls that are made meanwhile."""
    from llms.verify.gates.phase7 import checks, gates
    from llms.verify.gates.phase7.integrity import watching_code

    config = opened.config()
    sniffing = watching_code(request.folder)
    with setting.watch(request.folder, adapter, config) as watch:
        runner = opened.runner(max(len(prompt) for prompt in prompts) + checks.GATE_TOKENS)
        prepare = offered(runner, "prepare")
        if prepare is not None:
            for length in (len(prompts[0]), checks.MADE_UP_TOKENS):
                prepare(length)
        runs = checks.check_production(audit, runner, prompts[0], config, watch, setting.clock)
        reference = opened.hf_reference()
        checks.check_reference(audit, opened, reference, prompts[0], watch)
        known = gates.ReferenceRuns(reference)
        if runs is not None:
            made_up, again = runs
            checks.check_time(audit, again, config, watch)
            checks.check_product(audit, opened, watch, made_up)
        opened.release_runners()
        gates.check_gate(audit, opened, known, prompts, watch)
    changed = [*watch.replaced, *sniffing, *shipped.changed()]
    checks.check_integrity(audit, changed, len(shipped.prints))
    return known


def _environment() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "machine": platform.machine(), "process": str(os.getpid())}
    for package in ("torch", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["interpreter"] = Path(sys.executable).name
    return found
