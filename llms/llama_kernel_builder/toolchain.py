"""Toolchains: what turns a program into an artefact that the driver can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from .exceptions import ArtefactMissing, CompileFailed
from .program import Program


class Toolchain(Protocol):
    """Compiles a program into one file.

    `identity` names the toolchain and its version: it is part of the cache key, so another
    compiler never serves the artefacts of this one.
    """

    @property
    def identity(self) -> str:
        """Name and version."""
        ...

    def compile(self, program: Program, destination: Path) -> None:
        """Write the artefact of `program` to `destination`. Raises CompileFailed with the diagnosis."""
        ...


class TwinToolchain:
    """The twin's compiler: checks the NPU2 constraints and writes a readable program listing."""

    @property
    def identity(self) -> str:
        """Compiler name, version and listing format."""
        from npu_twin import compiler, listing

        return f"{compiler.TOOLCHAIN_IDENTITY}, listing format {listing.VERSION}"

    def compile(self, program: Program, destination: Path) -> None:
        """Compile to a program listing (JSON text)."""
        from npu_twin import compiler

        try:
            listing = compiler.compile_program(program.request())
        except compiler.CompileError as error:
            raise CompileFailed(program.name, str(error)) from error
        destination.write_text(listing.to_json(), encoding="utf-8")


class PrebuiltToolchain:
    """Artefacts built elsewhere: a folder of ELFs with a `manifest.json`.

    Manifest: {"toolchain": "<identity>", "entries": {"<program digest>": {"name": ..., "file": ...}}}.
    A program that is not listed, or whose file is gone, raises ArtefactMissing: an artefact of
    another program is never served under the same name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = folder / "manifest.json"
        if not manifest.is_file():
            raise ArtefactMissing(("any program",), f"{folder} (no manifest.json)")
        try:
            data = json.loads(manifest.read_text(encoding="utf-8"))
            self._identity = str(data["toolchain"])
            self._entries: Mapping[str, Mapping[str, str]] = data["entries"]
        except (ValueError, KeyError, TypeError) as error:
            raise ArtefactMissing(("any program",), f"{manifest} (unreadable: {error!r})") from error

    @property
    def identity(self) -> str:
        """The identity the manifest states."""
        return self._identity

    def compile(self, program: Program, destination: Path) -> None:
        """Copy the prebuilt artefact of exactly this program."""
        entry = self._entries.get(program.digest)
        source = self.folder / entry["file"] if entry else None
        if source is None or not source.is_file():
            raise ArtefactMissing((program.name,), str(self.folder))
        shutil.copyfile(source, destination)

    def missing(self, programs: tuple[Program, ...]) -> tuple[str, ...]:
        """Names of the programs without an artefact, for a check before a run."""
        found = self._entries
        return tuple(
            program.name
            for program in programs
            if program.digest not in found or not (self.folder / found[program.digest]["file"]).is_file()
        )
