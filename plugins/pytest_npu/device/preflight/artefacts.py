"""Check of the compiled artefacts that the phases of a model need on silicon."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_npu.device.preflight.types import Finding

if TYPE_CHECKING:
    from llms.llama_kernel_builder.program import Program

NAME = "compiled artefacts"
WHY = "silicon runs what a toolchain built for it; nothing is compiled in a test run"
#: Phases that launch every kernel alone, that run the model as it is deployed, and with one ELF per kernel.
LEAF, MERGED, UNFUSED = {1}, {2, 3, 4, 5, 6, 7}, {3, 4, 5}
EVERY_PHASE = frozenset(LEAF | MERGED)


@dataclass(frozen=True)
class Selection:
    """What of a model is going to run.

    phases: of the selected gates. kernels: cases of phase 1; None stands for those of its quick run.
    config, prompt_len: of the deployed checkpoint and the first prompt, where they are known; else the
    published configuration and a prompt of the smallest compiled length.
    """

    phases: Collection[int] = EVERY_PHASE
    kernels: Collection[Any] | None = None
    config: Any = None
    prompt_len: int = 1


def selection(
    folder: Path,
    phases: Collection[int],
    kernels: Collection[Any] | None = None,
    *,
    checkpoint: Path | None = None,
    choice: str | None = None,
) -> Selection:
    """What is going to run of a model folder, with the checkpoint that is judged when it can be opened."""
    if not MERGED & set(phases) and (kernels is not None or not LEAF & set(phases)):
        return Selection(phases, kernels)
    try:
        from llms.checkpoints import CheckpointError
        from llms.verify.contract.deployment import Deployment, DeploymentError
    except ImportError:
        return Selection(phases, kernels)
    try:
        deployment = Deployment.from_folder(folder, model_choice=choice, checkpoint=checkpoint)
        return Selection(phases, kernels, deployment.config(), len(deployment.prompts(1)[0]))
    except (ImportError, CheckpointError, DeploymentError):
        return Selection(phases, kernels)  # the gates say what is wrong with it


@dataclass(frozen=True)
class Needed:
    """One program: its name, its digest (the key in manifest.json), the phases that run it, is it there."""

    name: str
    digest: str
    phases: tuple[int, ...]
    present: bool


def needed(
    model: str, adapter: Any, selection: Selection | None = None
) -> tuple[Path, tuple[Needed, ...]] | None:
    """The folder of a model's artefacts and the programs that run; None where nothing has to be there before.

    That is an adapter that builds its own way, or a toolchain that builds when a program is asked for. Raises
    ArtefactMissing when the folder's manifest cannot be read.
    """
    from llms.llama_kernel_builder.toolchains.seam import PrebuiltToolchain, toolchain_for

    sequence = getattr(getattr(adapter, "inference", None), "SEQUENCE", None)
    toolchain = toolchain_for("npu2", model)
    if sequence is None or not isinstance(toolchain, PrebuiltToolchain):
        return None
    selection = selection or Selection()
    found: dict[str, tuple[Program, set[int]]] = {}
    for phases, program in _programs(model, sequence, adapter, selection):
        found.setdefault(program.digest, (program, set()))[1].update(phases & set(selection.phases))
    missing = {program.digest for program in toolchain.lacking(program for program, _ in found.values())}
    return toolchain.folder, tuple(
        Needed(program.name, digest, tuple(sorted(phases)), digest not in missing)
        for digest, (program, phases) in found.items()
    )


def _programs(
    model: str, sequence: Any, adapter: Any, selection: Selection
) -> Iterator[tuple[set[int], Program]]:
    from llms.llama_kernel_builder.llama_loop import all_programs, bucket_for

    phases = set(selection.phases)
    config = selection.config if selection.config is not None else adapter.CONFIG
    if phases & LEAF:
        yield from ((LEAF, program) for program in _leaves(model, sequence, config, selection.kernels))
    if phases & MERGED:
        yield from ((MERGED, program) for program in all_programs(sequence, config))
    if phases & UNFUSED:
        seq_len = bucket_for(selection.prompt_len, config.max_position)
        yield from ((UNFUSED, program) for program in _unfused(sequence, config, seq_len))


def _unfused(sequence: Any, config: Any, seq_len: int) -> Iterator[Program]:
    """One ELF per kernel, for the compiled length of the prompt that is measured, and for decode."""
    from llms.llama_kernel_builder.llama_loop import suffix

    prefill = [block.named(suffix(seq_len)) for block in sequence.prefill_blocks(config, seq_len)]
    for block in (*prefill, *sequence.decode_blocks(config), sequence.lm_head(config)):
        yield from block.unmerged()


def _leaves(model: str, sequence: Any, config: Any, kernels: Collection[Any] | None) -> Iterator[Program]:
    from llms.llama_kernel_builder.bench import ModelBench, program_of
    from llms.verify.gates.phase1.gate import QUICK_PROMPT

    if kernels is None:
        every = ModelBench(model, sequence, config).cases()
        cases = [case for case in every if case.prompt_len <= QUICK_PROMPT]
    else:
        cases = [kernel.case for kernel in kernels if kernel is not None]
    # Of a case without a registry row the gate names the command that measures it.
    yield from (program_of(case) for case in cases if not case.unavailable)


def check(model: str, adapter: Any, selection: Selection | None = None) -> Finding | None:
    """Whether every program that is going to run has an artefact."""
    from llms.llama_kernel_builder.exceptions import ArtefactMissing, ToolkitError
    from llms.llama_kernel_builder.toolchains.seam import ARTEFACTS_ENV, MANIFEST, TOOLCHAIN_ENV

    try:
        found = needed(model, adapter, selection)
    except ArtefactMissing as error:
        return Finding(NAME, "bad", str(error), WHY, f"write {MANIFEST} anew")
    except ToolkitError as error:
        return Finding(NAME, "bad", str(error), WHY, f"correct or unset ${TOOLCHAIN_ENV}")
    if found is None:
        return None
    folder, programs = found
    missing = [program for program in programs if not program.present]
    data = {
        "folder": str(folder),
        "programs": [
            {"name": p.name, "digest": p.digest, "phases": list(p.phases), "present": p.present}
            for p in programs
        ],
    }
    if not missing:
        return Finding(NAME, "ok", f"{model}: all {len(programs)} in {folder}", WHY, data=data)
    remedy = (
        f"build them with the mlir-air toolchain, list them in {folder / MANIFEST} by digest (`npu-deploy "
        f"doctor {model} --json` prints them), or name another folder with ${ARTEFACTS_ENV}"
    )
    phases = sorted({phase for program in missing for phase in program.phases})
    text = (
        f"{model}: {len(missing)} of {len(programs)} for phase {', '.join(map(str, phases))} missing in "
        f"{folder}: {', '.join(program.name for program in missing)}"
    )
    return Finding(NAME, "bad", text, WHY, remedy, data=data)
