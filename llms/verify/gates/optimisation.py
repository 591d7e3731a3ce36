"""Phases 3 to 5, what they judge by: an optimisation against the form before it.

Payload `optimisation`: phase, section (`prefill`, `decode`; None in phase 3), clock, prompt_tokens, seq_len,
baseline_ms and production_ms (prefill, decode), gain_percent, status, problems and steps, each with name,
status, reason, before_ms, after_ms, gain_ms, gain_percent, before and after (elf_calls, launches, writes,
reads, bytes_written, bytes_read, low_tier_launches), topk (`OK`, `FAIL`), equal (how merged and unmerged
results compare), problems. Step status: `applied`; `skipped` with the reason (it is not legal or not
available for this model); `reverted` with its measured loss (it is not part of the production path);
`FAIL`: it is part of the production path and does not belong there.

A step fails when it leaves dispatch as it was, does not make its section strictly faster on the device clock,
brings in kernels that round inside the sum over K, fails the token-set gate, or changes a bit of the logits
although the leaf kernels are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llms.verify.contract.abilities.forms import MERGED, PRODUCTION, UNFUSED, Section
from llms.verify.contract.deployment import Deployment, Device
from llms.verify.contract.outcome import Outcome
from llms.verify.gates import measure
from llms.verify.gates.measure import Measured, Timed
from llms.verify.reference.hf import HFReference

# Different leaf kernels round differently: two bf16 steps of the largest logit, on the steps before the
# generated tokens part. Equal leaf kernels have no tolerance at all.
LOGIT_TOLERANCE = 2 * 2.0**-7


@dataclass(frozen=True)
class Step:
    """One optimisation of one section. Without `before` and `after` it was not possible: `reason` says why.

    deployed: whether production has it. topk_ok: token-set gate of the form after it, with its text. equal:
    how the results of both forms compare, `unequal` when they must not be as they are.
    """

    name: str
    before: Timed | None = None
    after: Timed | None = None
    reason: str = ""
    deployed: bool = True
    topk_ok: bool | None = None
    topk_text: str = ""
    equal: str | None = None
    unequal: str = ""


def judge_step(step: Step) -> Outcome:
    """Verdict of one step: a row of the payload, and the problems of a step that fails."""
    status, reason, problems = _verdict(step)
    row = {"name": step.name, "status": status, "reason": reason}
    times: dict[str, Any] = dict.fromkeys(
        ("before_ms", "after_ms", "gain_ms", "gain_percent", "before", "after")
    )
    if step.before is not None and step.after is not None:
        gain = step.before.ms - step.after.ms
        times = {
            "before_ms": step.before.ms,
            "after_ms": step.after.ms,
            "gain_ms": gain,
            "gain_percent": 100 * gain / step.before.ms,
            "before": measure.summary(step.before.dispatch),
            "after": measure.summary(step.after.dispatch),
        }
    topk = None if step.topk_ok is None else "OK" if step.topk_ok else "FAIL"
    payload = {**row, **times, "topk": topk, "equal": step.equal, "problems": problems}
    return Outcome("step", not problems, payload, "\n".join(f"{step.name}: {text}" for text in problems))


def _verdict(step: Step) -> tuple[str, str, list[str]]:
    """Status, reason and problems; the last are empty unless the status is FAIL."""
    if step.before is None or step.after is None:
        return "skipped", step.reason, []
    problems = []
    if step.before.dispatch == step.after.dispatch:
        problems.append("it changes nothing that is dispatched: the old path is still called")
    if not step.after.ms < step.before.ms:
        problems.append(
            f"it makes nothing faster: {step.before.ms:.3f} ms before, {step.after.ms:.3f} ms after"
        )
    before, after = (measure.low_tier(timed.dispatch) for timed in (step.before, step.after))
    bought = [str(kernel) for kernel, count in after.items() if count > before.get(kernel, 0)]
    if bought:
        problems.append(f"it buys speed with less exact kernels: {', '.join(bought)}")
    if step.topk_ok is False:
        problems.append(f"the token-set gate fails after it: {step.topk_text}")
    if step.unequal:
        problems.append(step.unequal)
    if not problems:
        gain = 100 * (1 - step.after.ms / step.before.ms)
        if not step.deployed:
            return "skipped", f"not part of the production path although {gain:.1f} % faster", []
        return "applied", step.reason or f"{gain:.1f} % faster", []
    if not step.deployed:
        return "reverted", "; ".join(problems), []
    return "FAIL", step.reason, problems


def compare_logits(before: Measured, after: Measured) -> tuple[str, str]:
    """How the logits of two forms compare, and what is wrong about it (empty when nothing is)."""
    leaves = [(form.prefill.dispatch.kernels, form.decode.dispatch.kernels) for form in (before, after)]
    differing = np.argwhere(before.logits.view(np.uint32) != after.logits.view(np.uint32))
    if not len(differing):
        return "bit for bit", ""
    if leaves[0] == leaves[1]:
        step, token = (int(i) for i in differing[0])
        text = f"leaf kernels are the same, logits are not (step {step}, first at token {token})"
        return "different", f"{text}: merging lost or changed something"
    chosen = [[s.token for s in m.gate.verdicts[0].npu.steps] for m in (before, after)]
    parted = next((i for i, (a, b) in enumerate(zip(*chosen, strict=True)) if a != b), len(chosen[0]) - 1)
    left, right = (m.logits[: parted + 1] for m in (before, after))
    worst = float(np.max(np.abs(left - right)) / np.max(np.abs(left)))
    if not worst <= LOGIT_TOLERANCE:
        return "different", f"logits differ by {worst:.4f} of the largest one, limit {LOGIT_TOLERANCE:.4f}"
    return f"within {worst:.4f} of the largest logit (limit {LOGIT_TOLERANCE:.4f})", ""


def forms(
    deployment: Deployment, reference: HFReference, device: Device
) -> tuple[Measured, Measured, Measured]:
    """The unfused, the merged and the production form, measured."""
    base, merged, final = (
        measure.measured(deployment, reference, form, device=device) for form in (UNFUSED, MERGED, PRODUCTION)
    )
    return base, merged, final


def common_steps(base: Measured, merged: Measured, final: Measured, section: Section) -> tuple[Step, Step]:
    """The steps that prefill and decode share: multi-launch merge and buffer reuse."""
    return (
        step_between("multi-launch merge", base, merged, section),
        step_between("buffer reuse", merged, final, section),
    )


def step_between(name: str, before: Measured, after: Measured, section: Section) -> Step:
    """The step from one form to the next, in one section."""
    equal, unequal = compare_logits(before, after)
    return gated(Step(name, getattr(before, section), getattr(after, section)), after, equal, unequal)


def gated(step: Step, after: Measured, equal: str | None = None, unequal: str = "") -> Step:
    """The step with the token-set gate of the form after it."""
    text = "; ".join(after.gate.reasons)
    return replace(step, topk_ok=after.gate.ok, topk_text=text, equal=equal, unequal=unequal)


def layout_steps(deployment: Deployment, section: Section) -> list[Step]:
    """The layouts that the model does not get, each with the reason."""
    layouts = measure.forms_of(deployment).layouts(section)
    return [Step(f"layout: {name}", reason=reason) for name, reason in layouts]


def phase_outcome(
    phase: int, section: Section, base: Measured, final: Measured, steps: Sequence[Step]
) -> Outcome:
    """Verdict of a phase: its steps, the gate on the production form, strictly less time than unfused."""
    judged = [judge_step(step) for step in steps]
    problems = [line for one in judged if not one.ok for line in one.message.splitlines()]
    before, after = (getattr(form, section).ms for form in (base, final))
    if not base.gate.ok:
        problems.append(f"the unfused baseline fails the token-set gate: {'; '.join(base.gate.reasons)}")
    if not final.gate.ok:
        problems.append(f"the production form fails the token-set gate: {'; '.join(final.gate.reasons)}")
    if not after < before:
        problems.append(f"{section} takes {after:.3f} ms, the unfused baseline {before:.3f} ms")
    if not any(one.payload["status"] == "applied" for one in judged):
        problems.append("no optimisation is applied")
    payload = {
        **head(phase, section, base, final),
        "gain_percent": 100 * (1 - after / before) if before else None,
        "steps": [one.payload for one in judged],
        "status": "FAIL" if problems else "OK",
        "problems": problems,
    }
    return Outcome.of("optimisation", f"phase {phase}, {section}", problems, payload)


def head(
    phase: int, section: Section | None, base: Measured, final: Measured | None = None
) -> dict[str, Any]:
    """What the payloads of all three phases begin with."""
    return {
        "phase": phase,
        "section": section,
        "clock": base.clock,
        "prompt_tokens": len(base.prompt),
        "seq_len": base.seq_len,
        "runs": list(base.runs),
        "baseline_ms": _times(base),
        "production_ms": None if final is None else _times(final),
    }


def _times(form: Measured) -> dict[str, float]:
    return {"prefill": form.prefill.ms, "decode": form.decode.ms}
