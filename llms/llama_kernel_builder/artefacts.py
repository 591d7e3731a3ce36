"""Compiled artefacts on disk: keyed on content, written atomically, checked before use."""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from llms.llama_kernel_builder.toolchains.seam import Loading, Toolchain

from .program import Program

FORMAT_VERSION = 2


class TornArtefactWarning(UserWarning):
    """A cached artefact does not match the hash recorded when it was built; it is built again."""


@dataclass(frozen=True)
class Artefact:
    """One compiled program: `path` to load, `key` that covers program, toolchain and format."""

    path: Path
    key: str
    built: bool


class ArtefactStore:
    """A folder of artefacts, safe for several processes.

    The key is a hash of the program, the toolchain's identity and the format version: a changed
    tile, launch or compiler can never be served under an old name. The artefact's own hash stands
    in a sidecar file that is written last, so a killed build leaves nothing that looks complete.
    """

    def __init__(self, folder: Path, toolchain: Toolchain) -> None:
        self.folder = folder
        self.toolchain = toolchain

    def key(self, program: Program) -> str:
        """Content key of a program under this toolchain."""
        text = f"{FORMAT_VERSION}\n{self.toolchain.identity}\n{program.digest}"
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, program: Program) -> Artefact:
        """Return the artefact of a program, compiling it when it is absent or damaged.

        Raises CompileFailed or ArtefactMissing from the toolchain.
        """
        key = self.key(program)
        path = self.folder / f"{program.name}-{key[:20]}.elf"
        sidecar = path.with_suffix(".json")
        if self._intact(path, sidecar, key):
            return Artefact(path, key, built=False)
        if path.exists() and sidecar.exists():
            warnings.warn(
                f"{path}: content does not match its record; compiling it again",
                TornArtefactWarning,
                stacklevel=2,
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".build-") as work:
            built = Path(work) / path.name
            loading = self.toolchain.compile(program, built) or Loading(program.name)
            record = {
                "key": key,
                "name": program.name,
                "toolchain": self.toolchain.identity,
                "format": FORMAT_VERSION,
                "sha256": _sha256(built),
                "kernel": loading.kernel,
                "instructions": None,
            }
            if loading.instructions is not None:
                code = Path(work) / loading.instructions
                record["instructions"] = {"file": code.name, "sha256": _sha256(code)}
                code.replace(self.folder / code.name)
            note = Path(work) / sidecar.name
            note.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            built.replace(path)
            note.replace(sidecar)
        return Artefact(path, key, built=True)

    @staticmethod
    def _intact(path: Path, sidecar: Path, key: str) -> bool:
        try:
            record = json.loads(sidecar.read_text(encoding="utf-8"))
            code = record["instructions"]
            return bool(
                record["key"] == key
                and record["sha256"] == _sha256(path)
                and (code is None or code["sha256"] == _sha256(path.parent / code["file"]))
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False


def loading_of(path: Path, program: str) -> Loading:
    """How to load an artefact of a store, from its record; a file without one is a full ELF of that name."""
    try:
        record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        code = record["instructions"]
        return Loading(record["kernel"], str(path.parent / code["file"]) if code else None)
    except (OSError, ValueError, KeyError, TypeError):
        return Loading(program)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
