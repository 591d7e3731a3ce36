"""Check of the compiled artefacts a model needs on silicon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .types import Finding


@dataclass(frozen=True)
class Needed:
    """One program of a model: its name, its digest (the key in manifest.json), and whether it is there."""

    name: str
    digest: str
    present: bool


def needed(model: str, adapter: Any, config: Any = None) -> tuple[Path, tuple[Needed, ...]] | None:
    """The folder of a model's artefacts and its programs; None for an adapter that builds its own way.

    Raises ArtefactMissing when the folder's manifest cannot be read.
    """
    from llms.llama_kernel_builder.llama_loop import all_programs
    from llms.llama_kernel_builder.toolchain import PrebuiltToolchain, prebuilt_folder

    inference = getattr(adapter, "inference", None)
    sequence = getattr(inference, "SEQUENCE", None)
    if sequence is None:
        return None
    folder = prebuilt_folder(model)
    toolchain = PrebuiltToolchain(folder, required=False)
    programs = list(all_programs(sequence, config if config is not None else adapter.build_config()))
    missing = set(toolchain.missing(programs))
    return folder, tuple(Needed(p.name, p.digest, p.name not in missing) for p in programs)


def check(model: str, adapter: Any) -> Finding | None:
    """Whether every program of the model has an artefact."""
    from llms.llama_kernel_builder.exceptions import ArtefactMissing
    from llms.llama_kernel_builder.toolchain import ARTEFACTS_ENV, MANIFEST

    why = "silicon runs what a toolchain built for it; nothing is compiled in a test run"
    try:
        found = needed(model, adapter)
    except ArtefactMissing as error:
        return Finding("compiled artefacts", "bad", str(error), why, f"write {MANIFEST} anew")
    if found is None:
        return None
    folder, programs = found
    missing = [program.name for program in programs if not program.present]
    data = {
        "folder": str(folder),
        "programs": [{"name": p.name, "digest": p.digest, "present": p.present} for p in programs],
    }
    if not missing:
        return Finding(
            "compiled artefacts", "ok", f"{model}: all {len(programs)} in {folder}", why, data=data
        )
    remedy = (
        f"build them with the mlir-air toolchain, list them in {folder / MANIFEST} by digest (`npu-deploy "
        f"doctor {model} --json` prints them), or name another folder with ${ARTEFACTS_ENV}"
    )
    text = f"{model}: {len(missing)} of {len(programs)} missing in {folder}: {', '.join(missing)}"
    return Finding("compiled artefacts", "bad", text, why, remedy, data=data)
