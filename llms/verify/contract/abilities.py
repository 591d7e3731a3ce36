"""Optional abilities: what a phase may ask of a deployment beyond `prefill` and `decode_step`.

One that is missing is "not offered": never a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from llms.verify.contract.records import Array


class NothingToWatch(Exception):
    """A model folder has no production functions; the text says which are missing."""


@dataclass(frozen=True, eq=False)
class ProductionCall:
    """One call of a production function: its name, (token, logits [vocab]) if it returned some, and how many
    programs were started on the device inside.
    """

    function: str
    result: tuple[int, Array] | None
    started: int


class Watch(Protocol):
    """What happens below a runner while it works, for phase 7.

    Who is audited does not choose who watches: a watch comes from the toolkit by way of whoever starts the
    audit, never from the runner or from the model's folder.

    name: of the module with the production functions. replaced: those that are not the ones of its source.
    """

    name: str
    replaced: tuple[str, ...]

    def take(self) -> tuple[Sequence[ProductionCall], Counter[str]]:
        """Calls of production functions, and programs started by name, since the last `take`."""
        ...

    def programs_per_call(self, length: int) -> Mapping[str, int] | None:
        """Programs that one call must start, by function, for `length` prompt tokens; None: not offered."""
        ...

    def compiled_length(self, length: int) -> int:
        """Rows that the prefill of a prompt of `length` tokens computes."""
        ...

    def predicted_ms(self, length: int) -> Mapping[str, float]:
        """Milliseconds that a `prefill` of `length` tokens and a `decode step` behind it should take."""
        ...

    def generate(
        self, checkpoint: Any, tokenizer: Any, ids: Sequence[int], n_tokens: int
    ) -> tuple[int, ...] | None:
        """Tokens that the product generates, on the way that its command line takes; None: not offered."""
        ...


Watcher = Callable[[Path, ModuleType, Any], AbstractContextManager[Watch]]
"""`(model folder, its adapter, its configuration)` -> a watch while it is entered. Raises NothingToWatch."""
