"""Ability `watch`: what happens below a runner while it works (phase 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from llms.verify.contract.records import Array


@dataclass(frozen=True, eq=False)
class ProductionCall:
    """One call of a production function: its name, (token, logits [vocab]) if it returned some, and how many
    programs were started on the device inside.
    """

    function: str
    result: tuple[int, Array] | None
    started: int


class Watch(Protocol):
    """What happens below a runner while it works.

    name: of the module with the production functions. replaced: those that are not the ones of its source.
    """

    name: str
    replaced: tuple[str, ...]

    def take(self) -> tuple[Sequence[ProductionCall], Counter[str]]:
        """Calls of production functions, and programs started by name, since the last `take`."""

    def programs_per_call(self, length: int) -> Mapping[str, int] | None:
        """Programs that one call must start, by function, for `length` prompt tokens; None: not offered."""

    def compiled_length(self, length: int) -> int:
        """Rows that the prefill of a prompt of `length` tokens computes."""

    def predicted_ms(self, length: int) -> Mapping[str, float]:
        """Milliseconds that a `prefill` of `length` tokens and a `decode step` behind it should take."""

    def generate(
        self, checkpoint: Any, tokenizer: Any, ids: Sequence[int], n_tokens: int
    ) -> tuple[int, ...] | None:
        """Tokens that the product generates, on the way that its command line takes; None: not offered."""


Watcher = Callable[[Path, ModuleType, Any], AbstractContextManager[Watch]]
"""`(model folder, its adapter, its configuration)` -> a watch while it is entered. Raises NotOffered."""
