"""Ability `performance`: what the performance tests of phase 6 time."""

from __future__ import annotations

from typing import Any, Protocol

from llms.verify.contract.abilities.forms import Section


class Performance(Protocol):
    """What ``performance()`` of a runner returns: everything in place, nothing of it timed."""

    def first_token(self) -> int:
        """Tokenise, prefill, choose the first token."""

    def decode_one(self) -> int:
        """One decode step after ``first_token``; the position wraps at the end of the KV cache."""

    def breakdown(self, section: Section) -> list[dict[str, Any]]:
        """Rows per ELF, kernel, host operation and transfer of one more prefill or decode step."""

    def comparison(self) -> dict[str, Any]:
        """Payload of a record ``comparison``: predicted and published figures of this model."""
