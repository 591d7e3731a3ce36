"""Names that folders of earlier scaffolds import; see llms.verify.gates.phase6.performance."""

from __future__ import annotations

from typing import Any

from llms.verify.contract.abilities import Section
from llms.verify.gates.phase6.performance import ReadyToTime, set_up

__all__ = ["breakdown", "decode_one", "first_token", "set_up"]


def first_token(ready: ReadyToTime) -> int:
    """Tokenise, prefill, choose the first token."""
    return ready.timed.first_token()


def decode_one(ready: ReadyToTime) -> int:
    """One decode step after `first_token`."""
    return ready.timed.decode_one()


def breakdown(ready: ReadyToTime, section: Section) -> list[dict[str, Any]]:
    """One more prefill or decode step with the profiler on."""
    return ready.timed.breakdown(section)
