"""The token-set gate: greedy, 32 tokens, k = 5, judged at the first divergence.

The rule is the one of vLLM's ``check_logprobs_close`` and of mlir-air's LLM examples (Xilinx/mlir-air
e972f2942): each side feeds itself its own tokens; at the first step where they differ, each side's token must
be among the other side's top k; what follows is no longer comparable. Unlike there, anything that leaves less
than that to judge is a failure: no prompts, missing steps, non-finite logits, a chosen token that is not the
first of its own top k, vocabularies of different size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

K = 5
N_TOKENS = 32


def top_k(logits: NDArray[Any], k: int = K) -> tuple[int, ...]:
    """Return the ids of the ``k`` largest of ``logits`` ``[vocab]``, largest first, ties by smaller id.

    NaN counts as smaller than everything, so the first id equals ``argmax`` for any finite row.

    Raises:
        ValueError: ``logits`` is not one-dimensional or has fewer than ``k`` entries.
    """
    values = np.asarray(logits)
    if values.ndim != 1 or values.size < k:
        raise ValueError(f"top_k needs a vector of at least {k} logits, got shape {values.shape}")
    values = values.astype(np.float32)
    values[np.isnan(values)] = -np.inf
    threshold = np.partition(values, values.size - k)[values.size - k]
    candidates = np.flatnonzero(
        values >= threshold
    )  # ascending ids: a stable sort keeps the smaller id first
    order = np.argsort(-values[candidates], kind="stable")
    return tuple(int(token) for token in candidates[order[:k]])


@dataclass(frozen=True)
class TokenStep:
    """One generated token and what its gate needs to know.

    Attributes:
        token: the token the side chose.
        topk: its own top k token ids, best first.
        finite: whether every logit of the step was finite.
        vocab: number of logits.
    """

    token: int
    topk: tuple[int, ...]
    finite: bool
    vocab: int

    @classmethod
    def from_logits(cls, token: int, logits: NDArray[Any], k: int = K) -> TokenStep:
        """Condense the logits ``[vocab]`` of one step."""
        values = np.asarray(logits)
        finite = bool(np.isfinite(values.astype(np.float32)).all())
        return cls(int(token), top_k(values, k), finite, int(values.size))


@dataclass(frozen=True)
class TokenTrace:
    """What one side generated for one prompt: the prompt's token ids and the steps that followed."""

    prompt_ids: tuple[int, ...]
    steps: tuple[TokenStep, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The generated token ids."""
        return tuple(step.token for step in self.steps)


@dataclass(frozen=True)
class PromptVerdict:
    """The judgement of one prompt. Ranks are 1-based places in the other side's top k (None: absent)."""

    status: Literal["OK", "FAIL"]
    reason: str
    divergence_step: int | None
    npu: TokenTrace
    hf: TokenTrace
    npu_rank_in_hf: int | None = None
    hf_rank_in_npu: int | None = None

    @property
    def ok(self) -> bool:
        """True when the prompt passed."""
        return self.status == "OK"


@dataclass(frozen=True)
class GateResult:
    """The judgement of all prompts; ``reasons`` lists every failure, one line each."""

    k: int
    n_tokens: int
    verdicts: tuple[PromptVerdict, ...]
    reasons: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True when at least one prompt was judged and all passed."""
        return not self.reasons


def integrity_problem(trace: TokenTrace, side: str, k: int, n_tokens: int) -> str | None:
    """Return why a trace cannot be judged, ``None`` when it is complete and consistent in itself."""
    if not trace.prompt_ids:
        return f"{side}: the prompt has no tokens"
    if len(trace.steps) != n_tokens:
        return f"{side}: {len(trace.steps)} steps, the gate needs all {n_tokens}"
    for index, step in enumerate(trace.steps):
        if not step.finite:
            return f"{side}: step {index} has logits that are not finite"
        if len(step.topk) != k or len(set(step.topk)) != k:
            return f"{side}: step {index} has {len(set(step.topk))} distinct top tokens, not {k}"
        if not 0 <= step.token < step.vocab:
            return f"{side}: step {index} chose token {step.token}, outside the vocabulary of {step.vocab}"
        if step.token != step.topk[0]:
            return f"{side}: step {index} chose token {step.token}, its own logits put {step.topk[0]} first"
    return None


def judge_prompt(npu: TokenTrace, hf: TokenTrace, *, k: int = K, n_tokens: int = N_TOKENS) -> PromptVerdict:
    """Judge one prompt; never raises for bad traces, they FAIL with a reason."""
    step = next((i for i, (a, b) in enumerate(zip(npu.tokens, hf.tokens, strict=False)) if a != b), None)

    def verdict(status: Literal["OK", "FAIL"], reason: str) -> PromptVerdict:
        ranks: tuple[int | None, int | None] = (None, None)
        if step is not None:
            ranks = (
                _rank(npu.steps[step].token, hf.steps[step].topk),
                _rank(hf.steps[step].token, npu.steps[step].topk),
            )
        return PromptVerdict(status, reason, step, npu, hf, *ranks)

    for trace, side in ((npu, "npu"), (hf, "hf")):
        problem = integrity_problem(trace, side, k, n_tokens)
        if problem is not None:
            return verdict("FAIL", problem)
    if npu.prompt_ids != hf.prompt_ids:
        at = _first_difference(npu.prompt_ids, hf.prompt_ids)
        return verdict("FAIL", f"the sides were given different prompt tokens (first difference at {at})")
    sizes = {one.vocab for one in (*npu.steps, *hf.steps)}
    if len(sizes) != 1:
        return verdict("FAIL", f"the sides have different vocabularies: {sorted(sizes)} logits")
    if step is None:
        return verdict("OK", f"all {n_tokens} tokens equal")
    npu_step, hf_step = npu.steps[step], hf.steps[step]
    outside = []
    if npu_step.token not in hf_step.topk:
        outside.append(f"npu token {npu_step.token} is not in the reference's top {k} {list(hf_step.topk)}")
    if hf_step.token not in npu_step.topk:
        outside.append(f"reference token {hf_step.token} is not in the npu's top {k} {list(npu_step.topk)}")
    if outside:
        return verdict("FAIL", f"step {step}: " + "; ".join(outside))
    return verdict("OK", f"first divergence at step {step}, each token in the other's top {k}")


def judge(
    npu: Sequence[TokenTrace], hf: Sequence[TokenTrace], *, k: int = K, n_tokens: int = N_TOKENS
) -> GateResult:
    """Judge all prompts of a gate. Empty input, or a different number of prompts per side, fails."""
    reasons: list[str] = []
    if not npu and not hf:
        reasons.append("no prompts were judged: an empty gate is no gate")
    if len(npu) != len(hf):
        reasons.append(f"the npu side has {len(npu)} prompts, the reference {len(hf)}")
    if k < 1 or n_tokens < 1:
        reasons.append(f"k = {k} and n_tokens = {n_tokens} judge nothing")
    verdicts = tuple(judge_prompt(a, b, k=k, n_tokens=n_tokens) for a, b in zip(npu, hf, strict=False))
    reasons += [f"prompt {index}: {one.reason}" for index, one in enumerate(verdicts) if not one.ok]
    return GateResult(k, n_tokens, verdicts, tuple(reasons))


def _rank(token: int, topk: tuple[int, ...]) -> int | None:
    return topk.index(token) + 1 if token in topk else None


def _first_difference(left: tuple[int, ...], right: tuple[int, ...]) -> str:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return f"position {index}, {a} and {b}"
    return f"their lengths, {len(left)} and {len(right)}"
