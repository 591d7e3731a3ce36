"""Which compiled artefacts the phases of a model need on silicon: the ability `needed_artefacts`."""

from __future__ import annotations

from collections.abc import Iterator

from llms.llama_kernel_builder.bench import ModelBench, program_of
from llms.llama_kernel_builder.deployment.session import InferenceModule
from llms.llama_kernel_builder.exceptions import ArtefactMissing, ToolkitError
from llms.llama_kernel_builder.llama_loop import KernelSequence, all_blocks, all_programs, bucket_for
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.program import Program
from llms.llama_kernel_builder.toolchains.seam import (
    ARTEFACTS_ENV,
    MANIFEST,
    TOOLCHAIN_ENV,
    PrebuiltToolchain,
    toolchain_for,
)
from llms.verify.contract.abilities.artefacts import (
    ArtefactList,
    ArtefactListError,
    ArtefactRequest,
    NeededArtefact,
)

#: Phases that launch every kernel alone, that run the model as it is deployed, and with one ELF per kernel.
LEAF, MERGED, UNFUSED = {1}, {2, 3, 4, 5, 6, 7}, {3, 4, 5}


def needed_artefacts(
    inference: InferenceModule, config: ModelConfig, request: ArtefactRequest
) -> ArtefactList | None:
    """The programs that run; None for a toolchain that builds when a program is asked for.

    Raises ArtefactListError when the toolchain is unknown or its manifest cannot be read.
    """
    model = inference.MODEL
    try:
        toolchain = toolchain_for("npu2", model)
        if not isinstance(toolchain, PrebuiltToolchain):
            return None
        programs: dict[str, tuple[Program, set[int]]] = {}
        for phases, program in _programs(model, inference.SEQUENCE, config, request):
            programs.setdefault(program.digest, (program, set()))[1].update(phases & set(request.phases))
        missing = {program.digest for program in toolchain.lacking(p for p, _ in programs.values())}
    except ArtefactMissing as error:
        raise ArtefactListError(str(error), f"write {MANIFEST} anew") from error
    except ToolkitError as error:
        raise ArtefactListError(str(error), f"correct or unset ${TOOLCHAIN_ENV}") from error
    return ArtefactList(
        toolchain.folder,
        tuple(
            NeededArtefact(program.name, digest, tuple(sorted(phases)), digest not in missing)
            for digest, (program, phases) in programs.items()
        ),
        f"build them with the mlir-air toolchain, list them in {toolchain.folder / MANIFEST} by digest "
        f"(`npu-deploy doctor {model} --json` prints them), or name another folder with ${ARTEFACTS_ENV}",
    )


def _programs(
    model: str, sequence: KernelSequence, config: ModelConfig, request: ArtefactRequest
) -> Iterator[tuple[set[int], Program]]:
    phases = set(request.phases)
    if phases & LEAF:
        cases = request.cases
        if cases is None:
            every = ModelBench(model, sequence, config).cases()
            cases = [case for case in every if case.prompt_len <= request.longest_case]
        # Of a case without a registry row the gate names the command that measures it.
        yield from ((LEAF, program_of(case)) for case in cases if not case.unavailable)
    if phases & MERGED:
        yield from ((MERGED, program) for program in all_programs(sequence, config))
    if phases & UNFUSED:
        seq_len = bucket_for(request.prompt_len, config.max_position)
        # one ELF per kernel, for the compiled length of the prompt that is measured, and for decode
        for block in all_blocks(sequence, config, (seq_len,)):
            yield from ((UNFUSED, program) for program in block.unmerged())
