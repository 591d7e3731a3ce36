"""Toolchains: what turns a program into an artefact that the driver can load."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llms.llama_kernel_builder.exceptions import ArtefactMissing, CompileFailed, ToolkitError
from llms.llama_kernel_builder.program import Program

MANIFEST = "manifest.json"
ARTEFACTS_ENV = "NPU_ARTEFACTS"
TOOLCHAIN_ENV = "NPU_TOOLCHAIN"


@dataclass(frozen=True)
class Loading:
    """How the driver loads an artefact.

    kernel: name of the kernel in it (full ELF of mlir-air: `main:<function>`; xclbin: `MLIR_AIE`).
    instructions: file of the instruction stream, which makes the artefact an xclbin; None for a full ELF.
    """

    kernel: str
    instructions: str | None = None


class Toolchain(Protocol):
    """Compiles a program into one artefact.

    `identity` names the toolchain and its version: it is part of the cache key, so another
    compiler never serves the artefacts of this one.
    """

    @property
    def identity(self) -> str:
        """Name and version."""
        ...

    def compile(self, program: Program, destination: Path) -> Loading | None:
        """Write the artefact of `program` to `destination`. Raises CompileFailed with the diagnosis.

        Everything a build needs is in the program: per launch op, dims, operand dtypes, method, tile, herd,
        rounding, external symbol and object file; per ELF the buffers, the instance name and the options of
        the back end. The program's digest covers all of it.

        Returns how to load the artefact; None: a full ELF whose kernel has the program's name. An instruction
        stream goes next to the artefact, with the suffix `.insts`.
        """
        ...


class TwinToolchain:
    """The twin's compiler: checks the NPU2 constraints and writes a readable program listing."""

    @property
    def identity(self) -> str:
        """Compiler name, version and listing format."""
        from npu_twin import compiler, listing

        return f"{compiler.TOOLCHAIN_IDENTITY}, listing format {listing.VERSION}"

    def compile(self, program: Program, destination: Path) -> Loading | None:
        """Compile to a program listing (JSON text)."""
        from npu_twin import compiler
        from npu_twin.exceptions import CompileError

        try:
            listing = compiler.compile_program(program.request())
        except CompileError as error:
            raise CompileFailed(program.name, str(error)) from error
        destination.write_text(listing.to_json(), encoding="utf-8")
        return None


class PrebuiltToolchain:
    """Artefacts built elsewhere: a folder of ELFs with a `manifest.json`.

    Manifest: {"toolchain": "<identity>", "entries": {"<program digest>": ENTRY}}, ENTRY = {"name": program,
    "file": artefact, "kernel": name in the artefact (default: the program's), "instructions": file of the
    instruction stream (xclbin flow only)}. A program that is not listed, or whose file is gone, raises
    ArtefactMissing: an artefact of another program is never served under the same name. `npu-deploy doctor
    MODEL --json` lists the digests a model needs.

    Raises ArtefactMissing for a folder without a readable manifest, unless `required` is False: then it is
    a toolchain that has nothing.
    """

    def __init__(self, folder: Path, *, required: bool = True) -> None:
        self.folder = folder
        self.identity = f"prebuilt, nothing in {folder.name}"
        self._entries: Mapping[str, Mapping[str, str]] = {}
        manifest = folder / MANIFEST
        if not manifest.is_file():
            if required:
                raise ArtefactMissing(("any program",), f"{folder} (no {MANIFEST})")
            return
        try:
            data = json.loads(manifest.read_text(encoding="utf-8"))
            self.identity = str(data["toolchain"])
            self._entries = dict(data["entries"])
            for entry in self._entries.values():
                str(entry["file"])
        except (ValueError, KeyError, TypeError) as error:
            raise ArtefactMissing(("any program",), f"{manifest} (unreadable: {error!r})") from error

    def compile(self, program: Program, destination: Path) -> Loading | None:
        """Copy the prebuilt artefact of exactly this program."""
        if not self._has(program):
            raise ArtefactMissing((program.name,), str(self.folder))
        entry = self._entries[program.digest]
        shutil.copyfile(self.folder / entry["file"], destination)
        instructions = entry.get("instructions")
        if instructions is not None:
            copied = destination.with_suffix(".insts")
            shutil.copyfile(self.folder / instructions, copied)
            instructions = copied.name
        return Loading(entry.get("kernel", program.name), instructions)

    def _has(self, program: Program) -> bool:
        entry = self._entries.get(program.digest)
        if entry is None:
            return False
        files = [entry["file"], *([entry["instructions"]] if "instructions" in entry else [])]
        return all((self.folder / name).is_file() for name in files)

    def lacking(self, programs: Iterable[Program]) -> tuple[Program, ...]:
        """The programs without an artefact, for a check before a run."""
        return tuple(program for program in programs if not self._has(program))


def prebuilt_folder(model: str = "") -> Path:
    """Where the artefacts of a model for silicon are expected.

    `$NPU_ARTEFACTS/<model>` if it has a manifest, else `$NPU_ARTEFACTS`; without the variable a folder of
    the cache.
    """
    from llms.checkpoints import cache_root

    given = os.environ.get(ARTEFACTS_ENV)
    if not given:
        return cache_root() / "npu2-artefacts" / model
    root = Path(given).expanduser()
    return root / model if (root / model / MANIFEST).is_file() else root


def toolchain_for(device: str, model: str = "") -> Toolchain:
    """The toolchain of a device: the twin compiles, silicon is served what was built elsewhere.

    `$NPU_TOOLCHAIN` (`module:factory`) puts another one in for both; the factory is called with device and
    model and returns a `Toolchain`. Raises ToolkitError for a value that names none.
    """
    named = os.environ.get(TOOLCHAIN_ENV)
    if named:
        return _named_toolchain(named, device, model)
    return TwinToolchain() if device == "twin" else PrebuiltToolchain(prebuilt_folder(model), required=False)


def _named_toolchain(named: str, device: str, model: str) -> Toolchain:
    module, _, factory = named.partition(":")
    try:
        made: Toolchain = getattr(importlib.import_module(module), factory)(device, model)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ToolkitError(
            f"{TOOLCHAIN_ENV}='{named}' gives no toolchain ({type(error).__name__}: {error}); it must be "
            "'module:factory', importable here, and factory(device, model) must return the toolchain"
        ) from error
    if not callable(getattr(made, "compile", None)) or not isinstance(getattr(made, "identity", None), str):
        raise ToolkitError(
            f"{TOOLCHAIN_ENV}='{named}' made a {type(made).__name__} without identity or compile"
        )
    return made
