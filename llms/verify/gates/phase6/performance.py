"""What the performance tests time, on the production functions: TTFT and one decode step.

TTFT runs from before tokenising to the first token; a decode step is one token in steady state. Set-up
(weights, kernels, buffers) is done before and never timed. Definitions as in the mlir-air LLM examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llms.verify.contract.abilities import Performance, needed
from llms.verify.contract.deployment import Deployment

_TEXT = (
    "The history of computing began long before electronic machines: clerks, tables and looms came first. "
)


@dataclass(frozen=True)
class ReadyToTime:
    """A deployment with everything in place for a prompt of `n_tokens` tokens."""

    deployment: Deployment
    timed: Performance
    n_tokens: int


def set_up(deployment: Deployment, n_tokens: int) -> ReadyToTime:
    """Build the runner for a prompt of `n_tokens` and twice as many positions.

    A model that takes fewer positions gets a prompt of half of them: see `n_tokens` of the answer. Raises
    NotOffered for a runner whose set-up cannot be told from its prefill.
    """
    n_tokens = min(n_tokens, int(getattr(deployment.config(), "max_position", 2 * n_tokens)) // 2)
    text = _TEXT * (1 + n_tokens // 12)

    def tokenise() -> Sequence[int]:
        return deployment.encode(text).ids[:n_tokens]

    if len(tokenise()) < n_tokens:
        raise ValueError(f"the profiling text has fewer than {n_tokens} tokens for this tokenizer")
    prepare = needed(deployment.runner(2 * n_tokens, lite_mode=True), "performance")
    timed: Performance = prepare(tokenise, n_tokens)
    return ReadyToTime(deployment, timed, n_tokens)
