"""Check of the compiled artefacts that the phases of a model need on silicon."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_npu.device.preflight.types import Finding

if TYPE_CHECKING:
    from llms.verify.contract.abilities.artefacts import ArtefactRequest

NAME = "compiled artefacts"
WHY = "silicon runs what a toolchain built for it; nothing is compiled in a test run"
EVERY_PHASE = frozenset(range(1, 8))


def request(
    folder: Path,
    phases: Collection[int],
    kernels: Collection[Any] | None = None,
    *,
    checkpoint: Path | None = None,
    choice: str | None = None,
) -> ArtefactRequest:
    """What is going to run of a model folder, with the checkpoint that is judged when it can be opened.

    `kernels` are parameters of phase 1's tests; None stands for those of its quick run.
    """
    from llms.checkpoints import CheckpointError
    from llms.verify.contract.deployment import Deployment, DeploymentError

    published = published_request(phases, kernels)
    if not set(phases) - {0, 1} and (kernels is not None or 1 not in phases):
        return published
    try:
        opened = Deployment.from_folder(folder, model_choice=choice, checkpoint=checkpoint)
        config, prompt_len = opened.config(), len(opened.prompts(1)[0])
    except (ImportError, CheckpointError, DeploymentError):
        return published  # the gates say what is wrong with it
    return published_request(phases, kernels, config, prompt_len)


def published_request(
    phases: Collection[int] = EVERY_PHASE,
    kernels: Collection[Any] | None = None,
    config: Any = None,
    prompt_len: int = 1,
) -> ArtefactRequest:
    """What runs in these phases; without a configuration that of the published model, with a short prompt."""
    from llms.verify.contract.abilities.artefacts import ArtefactRequest
    from llms.verify.gates.phase1.gate import QUICK_PROMPT

    cases = None if kernels is None else [kernel.case for kernel in kernels if kernel is not None]
    return ArtefactRequest(phases, cases, config, prompt_len, QUICK_PROMPT)


def check(model: str, adapter: Any, wanted: ArtefactRequest | None = None) -> Finding | None:
    """Whether every program that is going to run has an artefact; None where none has to be there before."""
    from llms.verify.contract.abilities import offered
    from llms.verify.contract.abilities.artefacts import ArtefactListError

    needed_artefacts = offered(adapter, "needed_artefacts")
    if needed_artefacts is None:
        return None
    try:
        needed = needed_artefacts(wanted if wanted is not None else published_request())
    except ArtefactListError as error:
        return Finding(NAME, "bad", str(error), WHY, error.remedy)
    if needed is None:
        return None
    programs = needed.artefacts
    missing = [program for program in programs if not program.present]
    data = {
        "folder": str(needed.folder),
        "programs": [
            {"name": p.name, "digest": p.digest, "phases": list(p.phases), "present": p.present}
            for p in programs
        ],
    }
    if not missing:
        return Finding(NAME, "ok", f"{model}: all {len(programs)} in {needed.folder}", WHY, data=data)
    phases = sorted({phase for program in missing for phase in program.phases})
    text = (
        f"{model}: {len(missing)} of {len(programs)} for phase {', '.join(map(str, phases))} missing in "
        f"{needed.folder}: {', '.join(program.name for program in missing)}"
    )
    return Finding(NAME, "bad", text, WHY, needed.remedy, data=data)
