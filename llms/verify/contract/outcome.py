"""The verdict of a gate, one type for all phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What a gate says.

    Attributes:
        kind: kind of the record in the report, such as ``topk_gate`` or ``block``.
        ok: whether it passed.
        payload: JSON-able result, recorded whether it passed or not.
        message: text of the failure; empty when it passed.
        notes: what is worth knowing although it decides nothing.
    """

    kind: str
    ok: bool
    payload: dict[str, Any]
    message: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        kind: str,
        title: str,
        problems: Sequence[str],
        payload: dict[str, Any],
        notes: Sequence[str] = (),
    ) -> Outcome:
        """A verdict from its problems (none: passed), which the message lists below ``title``."""
        message = "\n  ".join([f"{title}:", *problems]) if problems else ""
        return cls(kind, not problems, payload, message, tuple(notes))
