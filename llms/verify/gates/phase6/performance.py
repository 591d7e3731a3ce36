"""What the performance tests time, on the production functions: TTFT and one decode step.

TTFT runs from before tokenising to the first token; a decode step is one token in steady state. Set-up
(weights, kernels, buffers) is done before and never timed. Definitions as in the mlir-air LLM examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llms.llama_kernel_builder import host_ops
from llms.llama_kernel_builder.deployment.runner import ProductionRunner
from llms.llama_kernel_builder.deployment.session import Session
from llms.verify.contract.deployment import Deployment

_TEXT = (
    "The history of computing began long before electronic machines: clerks, tables and looms came first. "
)


@dataclass
class Prepared:
    """A session with everything in place, and a prompt of a fixed number of tokens."""

    session: Session
    deployment: Deployment
    text: str
    n_tokens: int
    state: tuple[Any, Any, int, int] | None = None

    def tokenise(self) -> Sequence[int]:
        """Encode the prompt and cut it to the length under test."""
        return self.deployment.encode(self.text).ids[: self.n_tokens]


def set_up(deployment: Deployment, n_tokens: int) -> Prepared:
    """Build the runner for a prompt of `n_tokens` and twice as many positions.

    A model that takes fewer positions gets a prompt of half of them: see `n_tokens` of the answer. Raises
    TypeError for a foreign runner: its set-up cannot be told from its prefill.
    """
    n_tokens = min(n_tokens, int(getattr(deployment.config(), "max_position", 2 * n_tokens)) // 2)
    runner = deployment.runner(2 * n_tokens, lite_mode=True)
    if not isinstance(runner, ProductionRunner):
        raise TypeError(f"{deployment.name}: a runner of type {type(runner).__name__} cannot be profiled")
    ready = Prepared(runner.session, deployment, _TEXT * (1 + n_tokens // 12), n_tokens)
    if len(ready.tokenise()) < n_tokens:
        raise ValueError(f"the profiling text has fewer than {n_tokens} tokens for this tokenizer")
    runner.session.prepare(n_tokens)
    return ready


def first_token(ready: Prepared) -> int:
    """Tokenise, prefill, choose the first token."""
    session = ready.session
    with host_ops.host_op(session.profiler, "tokenize", nbytes=16 * ready.n_tokens):
        ids = ready.tokenise()
    token, _, k_cache, v_cache, position = session.prefill(ids)
    ready.state = (k_cache, v_cache, token, position)
    return token


def decode_one(ready: Prepared) -> int:
    """One decode step after `first_token`; the position moves on and wraps at the end of the KV cache."""
    if ready.state is None:
        raise RuntimeError("decode_one before first_token: there is no KV cache yet")
    k_cache, v_cache, token, position = ready.state
    token, _ = ready.session.decode(token, k_cache, v_cache, position)
    following = position + 1 if position + 1 < ready.session.max_seq else ready.n_tokens
    ready.state = (k_cache, v_cache, token, following)
    return token


def breakdown(ready: Prepared, section: str) -> list[dict[str, Any]]:
    """Run one more prefill or decode step with the profiler on; rows per ELF, kernel, host op, transfer."""
    with ready.session.profiled() as profiler, profiler.section(section):
        if section == "prefill":
            first_token(ready)
        else:
            decode_one(ready)
    return profiler.breakdown()
