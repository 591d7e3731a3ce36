"""What a planted fault is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Plant = contextlib.AbstractContextManager[Any]
Kind = Literal["silent", "nan", "zeros", "hang", "compile", "runtime", "slow", "verdict"]
"""How a fault shows: wrong numbers without a sign, NaN, zeros, no end, no artefact, an error, time, a verdict
that is not earned."""

STAGES = ("compile", "runtime", *(f"phase{number}" for number in range(8)))
"""Where a fault can be caught, earliest first. `runtime` is the host runtime and toolkit, which refuse."""


def everywhere(model: Any) -> bool:
    """Applies to every model."""
    return True


@dataclass(frozen=True)
class Fault:
    """A bug of this field that can be switched on.

    Attributes:
        name: what ``--npu-fault`` takes.
        kind: how it shows.
        what: one line.
        origin: public source that describes it, or the convention that it breaks.
        expected: stage that must catch it, or an earlier one.
        plant: makes a context manager; inside its block the fault is there. Enter it before the deployment is
            opened and leave it when the work is done.
        entry: entry of the catalogue (A1 ...), empty for the ones without.
        applies: predicate over an opened deployment (``config()``, ``tokenizer``, ``name``).
        where: the predicate in words.
        ops: kernels that it hits, for the stage that judges single kernels.
        raises: name of the error that refuses it, when one does; any other error is a bug of the plant.
        says: text that this error must hold, e.g. the id of a broken rule.
        prompts: prompts that a ladder needs to see it: two for state that goes from one to the next.
    """

    name: str
    kind: Kind
    what: str
    origin: str
    expected: str
    plant: Callable[[], Plant]
    entry: str = ""
    applies: Callable[[Any], bool] = everywhere
    where: str = "every model"
    ops: tuple[str, ...] = ()
    raises: str = ""
    says: str = ""
    prompts: int = 1

    def __post_init__(self) -> None:
        if self.expected not in STAGES:
            raise ValueError(f"fault {self.name}: stage {self.expected!r} is none of {', '.join(STAGES)}")


@dataclass(frozen=True)
class Unplanted:
    """An entry of the catalogue without a plant, why, and what stands against it instead."""

    entry: str
    what: str
    reason: str
    guard: str
