"""Names that folders of earlier scaffolds import; see llms.verify.gates.phase3 to phase5."""

from __future__ import annotations

from typing import Any

from llms.verify.contract.outcome import Outcome
from llms.verify.gates.phase3 import gate as phase3
from llms.verify.gates.phase4.gate import prefill_gate
from llms.verify.gates.phase5.gate import decode_gate

__all__ = ["baseline_gate", "decode_gate", "prefill_gate"]


def baseline_gate(*subject: Any, **options: Any) -> tuple[Outcome, dict[str, dict[str, Any]]]:
    """Phase 3, as (verdict, payloads by kind)."""
    outcomes = phase3.baseline_gate(*subject, **options)
    return outcomes[-1], {outcome.kind: outcome.payload for outcome in outcomes}
