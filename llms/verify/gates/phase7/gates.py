"""The gates again, without caches: clean, and with faults planted that they must see."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llms.verify.gates.phase6 import gate as gates
from llms.verify.gates.phase7.call_recorder import Ledger
from llms.verify.gates.phase7.checks import FAULTS, GATE_K, GATE_TOKENS
from llms.verify.gates.phase7.types import Audit
from llms.verify.ladder.climbing import Ladder
from llms.verify.ladder.types import RungResult

if TYPE_CHECKING:
    from llms.verify.contract.chat import EncodedPrompt
    from llms.verify.contract.deployment import Deployment
    from llms.verify.reference.hf import HFReference, ReferenceRun

FAULT_TOKENS = 8


class Remembered:
    """Runs of the reference that this audit has computed, so that each is computed once."""

    def __init__(self, reference: HFReference) -> None:
        self._reference = reference
        self._runs: dict[tuple[Any, ...], ReferenceRun] = {}

    def run(self, prompt_ids: Sequence[int], n_tokens: int = GATE_TOKENS) -> ReferenceRun:
        """As HFReference.run."""
        key = (tuple(prompt_ids), n_tokens)
        if key not in self._runs:
            self._runs[key] = self._reference.run(prompt_ids, n_tokens)
        return self._runs[key]

    def release(self) -> None:
        """The model is kept until the audit ends."""


def check_gate(
    audit: Audit,
    opened: Deployment,
    reference: Remembered,
    prompts: Sequence[EncodedPrompt],
    ledger: Ledger,
) -> None:
    """The token-set gate on the production path, with the calls that it makes."""
    question = "Does the token-set gate pass without caches?"
    ledger.take()
    try:
        outcome = gates.topk_gate(opened, reference, prompts)  # type: ignore[arg-type]
    except Exception as error:
        audit.add("gate", question, [f"it ends in {type(error).__name__}: {error}"], "")
        return
    calls, _ = ledger.take()
    payload = outcome.payload
    audit.gate = payload
    problems = list(payload["reasons"]) if not outcome.ok else []
    if (payload["k"], payload["n_tokens"]) != (GATE_K, GATE_TOKENS):
        problems.append(
            f"it judged with k = {payload['k']} and {payload['n_tokens']} tokens, not {GATE_K} and "
            f"{GATE_TOKENS}"
        )
    if len(payload["prompts"]) != len(prompts) or not prompts:
        problems.append(f"it judged {len(payload['prompts'])} of {len(prompts)} prompts")
    made = [
        sum(call.function == name for call in calls) for name in ("run_npu_prefill", "run_npu_decode_step")
    ]
    wanted = [len(prompts), len(prompts) * (GATE_TOKENS - 1)]
    if made != wanted:
        problems.append(
            f"it made {made[0]} prefills and {made[1]} decode steps by the production functions, not "
            f"{wanted[0]} and {wanted[1]}"
        )
    exact = sum(prompt["divergence_step"] is None for prompt in payload["prompts"])
    audit.add(
        "gate",
        question,
        problems,
        f"prompts: {len(prompts)}, {GATE_TOKENS} tokens each, k = {GATE_K}; {exact} identical to the end; "
        f"{made[0]} prefills and {made[1]} decode steps by the production functions",
    )


def check_faults(
    audit: Audit, reopen: Callable[[], Deployment], reference: Remembered, prompt: EncodedPrompt
) -> None:
    """Three faults of the catalogue, each planted in a new deployment: the gates must fail."""
    from npu_twin import faults

    question = "Do the gates fail when the deployment is wrong?"
    problems, seen = [], []
    for name in FAULTS:
        try:
            with faults.find(name).plant():
                by = _who_sees(reopen(), reference, prompt)
        except Exception as error:
            by = f"an error ({type(error).__name__})"
        if by is None:
            problems.append(f"{name} is planted and no gate fails")
        else:
            seen.append(f"{name}: {by}")
    audit.figures.update(faults_planted=len(FAULTS), faults_seen=len(seen))
    audit.add("faults", question, problems, "; ".join(seen))


def _who_sees(opened: Deployment, reference: Remembered, prompt: EncodedPrompt) -> str | None:
    try:
        if not gates.topk_gate(opened, reference, [prompt]).ok:  # type: ignore[arg-type]
            return "token-set gate"
        outcome = Ladder(
            opened,
            reference,  # type: ignore[arg-type]
            [prompt],
            FAULT_TOKENS,
            limits_up_to=0,
        ).climb()
        failed = [rung.name for rung in outcome.rungs if not rung.ok]
        return f"ladder ({', '.join(failed)})" if failed else None
    finally:
        opened.release_runners()


def _nearest(rung: RungResult) -> dict[str, Any] | None:
    """The statistic of a rung that used most of its limit: {statistic, value, limit, share, where}."""
    judged = [one for one in rung.measured if one.limit]
    if not judged:
        return None
    one = max(judged, key=lambda m: m.value / (m.limit or 1.0))
    share = one.value / (one.limit or 1.0)
    if not math.isfinite(share):
        return None
    return {
        "statistic": one.statistic,
        "value": one.value,
        "limit": one.limit,
        "share": share,
        "where": one.where,
    }


def check_ladder(
    audit: Audit, opened: Deployment, reference: Remembered, prompts: Sequence[EncodedPrompt]
) -> None:
    """All rungs again; the last prompt is made up, so that no answer to it can be known in advance."""
    question = "Does the ladder pass without caches, a made-up prompt included?"
    try:
        outcome = Ladder(opened, reference, prompts, limits_up_to=0).climb()  # type: ignore[arg-type]
    except Exception as error:
        audit.add("ladder", question, [f"it ends in {type(error).__name__}: {error}"], "")
        return
    audit.ladder = [
        {"name": rung.name, "status": rung.status, "reason": rung.reason, "nearest": _nearest(rung)}
        for rung in outcome.rungs
    ]
    failed = [rung.message() for rung in outcome.rungs if not rung.ok]
    absent = [rung.name for rung in outcome.rungs if rung.status == "not offered"]
    passed = [rung.name for rung in outcome.rungs if rung.status == "passed"]
    if not failed and not passed:
        failed = ["no rung was passed"]
    audit.add(
        "ladder", question, failed, f"passed: {', '.join(passed)}; made-up prompt: {prompts[-1].text!r}"
    )
    if absent:
        audit.add("offered", "Are all rungs offered?", [f"not offered: {', '.join(absent)}"], "", warn=True)
