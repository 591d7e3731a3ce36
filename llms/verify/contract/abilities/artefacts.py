"""Ability `needed_artefacts`: the compiled programs that a run on silicon needs beforehand."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llms.verify.contract.kernel_case import KernelCase


@dataclass(frozen=True)
class ArtefactRequest:
    """What of a model is going to run, for ``needed_artefacts``.

    Attributes:
        phases: of the selected gates.
        cases: kernels of phase 1; None stands for all up to prompts of ``longest_case`` tokens.
        config: of the deployed checkpoint; None for the published configuration.
        prompt_len: tokens of the first prompt.
        longest_case: see ``cases``.
    """

    phases: Collection[int]
    cases: Collection[KernelCase] | None = None
    config: Any = None
    prompt_len: int = 1
    longest_case: int = 0


@dataclass(frozen=True)
class NeededArtefact:
    """A program to compile before the run: its name, digest (its key) and phases, and whether it is there."""

    name: str
    digest: str
    phases: tuple[int, ...]
    present: bool


@dataclass(frozen=True)
class ArtefactList:
    """The artefacts that a run on silicon needs, where they have to be, and how to provide them.

    ``needed_artefacts(request)`` of an adapter gives it, or None where nothing has to be there before the
    run. It raises ArtefactListError.
    """

    folder: Path
    artefacts: tuple[NeededArtefact, ...]
    remedy: str


class ArtefactListError(Exception):
    """The artefacts of a model cannot be listed; `remedy` says what to do about it."""

    def __init__(self, message: str, remedy: str) -> None:
        self.remedy = remedy
        super().__init__(message)
