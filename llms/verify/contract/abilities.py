"""Optional abilities of an adapter or its runner: what phases need beyond ``prefill`` and ``decode_step``.

A gate asks with :func:`needed`, or with :func:`offered` where it can do without. What lacks the ability gets
"not offered", never a pass. An ability only computes: references, inputs and limits stay with the gates.

* ``kernel_bench(folder) -> KernelBench`` of the adapter: phase 1
* ``needed_artefacts(request) -> ArtefactList | None`` of the adapter: the checks before a run on silicon
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llms.verify.contract.kernel_case import KernelCase
from llms.verify.contract.records import Array


class NotOffered(Exception):
    """The adapter or the runner lacks the ability that a gate needs; the text names it."""


def offered(provider: object, name: str) -> Callable[..., Any] | None:
    """The function of this name of a runner or an adapter module, or None when it has none.

    Where the ``build_runner`` of an adapter is the method of an object, what that object offers counts, too,
    so that a model folder need not name every ability.
    """
    owner = getattr(getattr(provider, "build_runner", None), "__self__", None)
    found = getattr(provider, name, None) or getattr(owner, name, None)
    return found if callable(found) else None


def needed(provider: object, name: str) -> Callable[..., Any]:
    """The function of this name. Raises NotOffered."""
    method = offered(provider, name)
    if method is None:
        kind = "adapter" if hasattr(provider, "build_runner") else "runner"
        raise NotOffered(f"the {kind} has no {name}() (a {type(provider).__name__})")
    return method


class KernelBench(Protocol):
    """Runs single kernels of a deployment (phase 1).

    An adapter offers it as ``kernel_bench(folder) -> KernelBench``, ``folder`` being the Hugging Face folder
    whose ``config.json`` counts, or None for the published configuration. It is asked while tests are
    collected: weights, network and device are out of reach, and heavy imports are unwelcome.
    """

    def cases(self) -> Sequence[KernelCase]:
        """Every kernel that prefill at any compiled length, decode and the LM head launch, each once."""
        ...

    def prepare(self, case: KernelCase) -> None:
        """Compile what a case needs; the device is not touched."""
        ...

    def run(self, case: KernelCase, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Launch a case once on the device; ``out`` of the result is its whole output.

        ``inputs`` by operand name, bf16, as :func:`llms.verify.reference.kernels.make_inputs` makes them.
        """
        ...


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
