"""One audit from end to end, in the process that it is called in."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llms.verify.gates.phase7.types import Audit

if TYPE_CHECKING:
    from llms.verify.gates.phase7.integrity import Snapshot


@dataclass(frozen=True)
class AuditRequest:
    """What to audit. `prompts` is the number of prompts of gate and ladder."""

    folder: Path
    npu: bool = False
    checkpoint: Path | None = None
    choice: str | None = None
    prompts: int = 1
    ladder: bool = True
    fault: str | None = None

    def command(self) -> str:
        """The command line that repeats it, from the root of the source tree."""
        words = ["python -m llms.audit", _relative(self.folder)]
        words += ["--npu"] if self.npu else []
        words += ["--checkpoint", str(self.checkpoint)] if self.checkpoint else []
        words += ["--model", self.choice] if self.choice else []
        words += ["--prompts", str(self.prompts)] if self.prompts != 1 else []
        words += ["--fault", self.fault] if self.fault else []
        return " ".join(words)


def _relative(folder: Path) -> str:
    root = Path(__file__).resolve().parents[4]
    path = folder.resolve()
    return str(path.relative_to(root)) if root in path.parents else path.name


def run_audit(request: AuditRequest) -> Audit:
    """Audit a model folder.

    The compiled programs and reference runs of earlier sessions are not used. On silicon the NPU lock is held
    from the first to the last question. Raises DeploymentError, CheckpointError, DriverUnavailable before the
    first question.
    """
    from llms.llama_kernel_builder import driver
    from llms.verify.contract.deployment import load_adapter
    from llms.verify.gates.phase7.integrity import Snapshot
    from llms.verify.reference.matched_model import FAMILIES

    begin = time.monotonic()
    device = driver.select(driver.NPU2 if request.npu else driver.TWIN)
    with ExitStack() as stack:
        if request.fault is not None:
            from npu_twin import faults

            stack.enter_context(faults.find(request.fault).plant())
        stack.enter_context(_lock(request.npu))
        if not request.npu:
            stack.enter_context(_fresh_artefacts())
        # before any code of the model has run
        shipped = Snapshot.take(FAMILIES)
        adapter = load_adapter(request.folder)
        audit = _ask(request, adapter, device, shipped)
    audit.seconds = time.monotonic() - begin
    audit.date = time.strftime("%Y-%m-%d %H:%M")
    return audit


def _ask(request: AuditRequest, adapter: Any, device: Any, shipped: Snapshot) -> Audit:
    from llms.verify.contract.deployment import Deployment
    from llms.verify.gates.phase7 import checks, gates
    from llms.verify.gates.phase7.call_recorder import NoProduction, production_module, watched
    from llms.verify.gates.phase7.integrity import patched_production, watching_code

    def reopen() -> Deployment:
        return Deployment.from_folder(
            request.folder, checkpoint=request.checkpoint, model_choice=request.choice, use_cache=False
        )

    opened = reopen()
    source = opened.checkpoint
    audit = Audit(
        model=opened.name,
        device=device.label,
        checkpoint={"label": source.label, "kind": source.kind, "content_hash": source.content_hash},
        environment=_environment(),
        command=request.command(),
    )
    checks.check_judge(audit, request.folder)
    checks.check_thresholds(audit, opened.reference_checkpoint)
    try:
        production = production_module(request.folder, adapter)
    except NoProduction as error:
        audit.add("production", "Does the runner call the model's production functions?", [str(error)], "")
        return audit
    prompts = opened.prompts(request.prompts)
    config = opened.config()
    path = request.folder / f"{request.folder.name}_inference.py"
    patched = [*patched_production(production, path), *watching_code(request.folder)]
    with watched(request.folder, production) as ledger:
        runner = opened.runner(max(len(prompt) for prompt in prompts) + checks.GATE_TOKENS)
        _prepare(runner, [len(prompts[0]), checks.MADE_UP_TOKENS])
        ran = checks.check_production(audit, runner, prompts[0], production, config, ledger)
        reference = opened.hf_reference()
        checks.check_reference(audit, opened, reference, prompts[0], ledger)
        known = gates.Remembered(reference)
        if ran is not None:
            checks.check_time(audit, ran[1], config, production)
            _guarded(audit, "product", lambda: checks.check_product(audit, opened, production, ran[0]))
        opened.release_runners()
        gates.check_gate(audit, opened, known, prompts, ledger)
    checks.check_integrity(audit, [*patched, *shipped.changed()], len(shipped.prints))
    if audit.ok:
        gates.check_faults(audit, reopen, known, prompts[0])
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


def _guarded(audit: Audit, key: str, ask: Callable[[], None]) -> None:
    try:
        ask()
    except Exception as error:
        audit.add(key, "Can the product generate?", [f"it fails: {type(error).__name__}: {error}"], "")


def _prepare(runner: Any, lengths: list[int]) -> None:
    prepare = getattr(runner, "prepare", None)
    if callable(prepare):
        for length in lengths:
            prepare(length)


@contextmanager
def _fresh_artefacts() -> Iterator[None]:
    """Compile everything anew, in a folder of this audit."""
    import llms.llama_kernel_builder.deployment.session as session

    name = "artefact_folder"
    original = getattr(session, name)
    with tempfile.TemporaryDirectory(prefix="npu-audit-") as folder:
        setattr(session, name, lambda model: Path(folder) / model)
        try:
            yield
        finally:
            setattr(session, name, original)


@contextmanager
def _lock(npu: bool) -> Iterator[None]:
    if not npu:
        yield
        return
    from pytest_npu.device.lock import NpuLock

    lock: AbstractContextManager[Any] = NpuLock()
    with lock:
        yield


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
