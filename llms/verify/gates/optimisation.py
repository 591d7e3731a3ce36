"""Phases 3, 4 and 5: the unfused baseline, and every optimisation after it measured and judged.

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
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llms.llama_kernel_builder.device_config import DEVICE_HEAD_DIMS, device_config
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.verify.contract.deployment import Deployment
from llms.verify.gates import measure
from llms.verify.gates.measure import Dispatch, Measured
from llms.verify.gates.payloads import describe_failure, diagnosis_payload, topk_gate_payload
from llms.verify.gates.phase1.kernel_laws import CASCADE_PASS
from llms.verify.gates.phase6.diagnosis import Diagnosis, diagnose
from llms.verify.gates.phase6.gate import GateOutcome
from llms.verify.reference.hf import HFReference

# Different leaf kernels round differently: two bf16 steps of the largest logit, on the steps before the
# generated tokens part. Equal leaf kernels have no tolerance at all.
LOGIT_TOLERANCE = 2 * 2.0**-7
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class Timed:
    """Time of one section in milliseconds, and what it dispatched."""

    ms: float
    dispatch: Dispatch


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


@dataclass(frozen=True)
class Judged:
    """A step with its verdict; `problems` is empty unless the status is FAIL."""

    step: Step
    status: str
    reason: str
    problems: tuple[str, ...] = field(default=())

    def payload(self) -> dict[str, Any]:
        """JSON-able row."""
        step, row = self.step, {"name": self.step.name, "status": self.status, "reason": self.reason}
        measured: dict[str, Any] = dict.fromkeys(
            ("before_ms", "after_ms", "gain_ms", "gain_percent", "before", "after")
        )
        if step.before is not None and step.after is not None:
            gain = step.before.ms - step.after.ms
            measured = {
                "before_ms": step.before.ms,
                "after_ms": step.after.ms,
                "gain_ms": gain,
                "gain_percent": 100 * gain / step.before.ms,
                "before": step.before.dispatch.summary(),
                "after": step.after.dispatch.summary(),
            }
        topk = None if step.topk_ok is None else "OK" if step.topk_ok else "FAIL"
        return {**row, **measured, "topk": topk, "equal": step.equal, "problems": list(self.problems)}


def judge_step(step: Step) -> Judged:
    """Verdict of one step; nothing is measured here."""
    if step.before is None or step.after is None:
        return Judged(step, "skipped", step.reason)
    problems = []
    if step.before.dispatch == step.after.dispatch:
        problems.append("it changes nothing that is dispatched: the old path is still called")
    if not step.after.ms < step.before.ms:
        problems.append(
            f"it makes nothing faster: {step.before.ms:.3f} ms before, {step.after.ms:.3f} ms after"
        )
    before, after = step.before.dispatch.low_tier(), step.after.dispatch.low_tier()
    bought = [str(spec) for spec, count in after.items() if count > before.get(spec, 0)]
    if bought:
        problems.append(f"it buys speed with less exact kernels: {', '.join(bought)}")
    if step.topk_ok is False:
        problems.append(f"the token-set gate fails after it: {step.topk_text}")
    if step.unequal:
        problems.append(step.unequal)
    if not problems:
        gain = 100 * (1 - step.after.ms / step.before.ms)
        if not step.deployed:
            return Judged(step, "skipped", f"not part of the production path although {gain:.1f} % faster")
        return Judged(step, "applied", step.reason or f"{gain:.1f} % faster")
    if not step.deployed:
        return Judged(step, "reverted", "; ".join(problems))
    return Judged(step, "FAIL", step.reason, tuple(problems))


def compare_logits(before: Measured, after: Measured) -> tuple[str, str]:
    """How the logits of two forms compare, and what is wrong about it (empty when nothing is)."""
    same_leaves = (before.prefill.kernels, before.decode.kernels) == (
        after.prefill.kernels,
        after.decode.kernels,
    )
    if np.array_equal(before.logits, after.logits):
        return "bit for bit", ""
    if same_leaves:
        step, token = (int(i) for i in np.argwhere(before.logits != after.logits)[0])
        text = f"leaf kernels are the same, logits are not (step {step}, first at token {token})"
        return "different", f"{text}: merging lost or changed something"
    chosen = [[s.token for s in m.gate.verdicts[0].npu.steps] for m in (before, after)]
    parted = next((i for i, (a, b) in enumerate(zip(*chosen, strict=True)) if a != b), len(chosen[0]) - 1)
    left, right = (_wide(m.logits[: parted + 1]) for m in (before, after))
    worst = float(np.max(np.abs(left - right)) / np.max(np.abs(left)))
    if not worst <= LOGIT_TOLERANCE:
        return "different", f"logits differ by {worst:.4f} of the largest one, limit {LOGIT_TOLERANCE:.4f}"
    return f"within {worst:.4f} of the largest logit (limit {LOGIT_TOLERANCE:.4f})", ""


def _wide(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    wide: np.ndarray[Any, Any] = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide


def attention_layout(config: ModelConfig) -> Step:
    """Attention on the projections as they are, without transposes on the host: legal up to head size 64."""
    name = "layout: attention without host transposes"
    if config.head_dim not in DEVICE_HEAD_DIMS:
        return Step(name, reason=f"no attention kernel for head_dim {config.head_dim}: the host attends")
    if config.head_dim > 64:
        reason = (
            f"head_dim {config.head_dim}: the sequence-first kernel hangs beyond one chunk of 64 "
            "columns, so the host puts heads first"
        )
        return Step(name, reason=reason)
    return Step(
        name, reason="nothing to change: the only kernel for this head size is sequence-first already"
    )


def cascade_form(config: ModelConfig) -> Step:
    """O+FFN of decode as a cascade of three launches: published, and less exact."""
    padded = device_config(config)
    name = "layout: cascade O+FFN in three launches"
    widths = {"emb_dim": padded.emb_dim, "q_dim": padded.q_dim, "hidden_dim": padded.hidden_dim}
    odd = [f"{key} {value}" for key, value in widths.items() if value % CASCADE_PASS]
    if odd:
        return Step(name, reason=f"not legal: {', '.join(odd)} is no multiple of 512")
    return Step(
        name, reason="lower precision: it rounds the running sum every 512 columns and sums the norm in bf16"
    )


def baseline_gate(
    deployment: Deployment, reference: HFReference, *, device: AbstractContextManager[Any] | None = None
) -> tuple[GateOutcome, dict[str, dict[str, Any]]]:
    """Phase 3: the unfused model passes the token-set gate, nothing is NaN; its times are the baseline.

    Returns the outcome and the payloads to record by kind: `topk_gate`, `diagnosis`, `optimisation`.
    """
    base = measure.measured(deployment, reference, measure.UNFUSED, device=device)
    topk = topk_gate_payload(base.gate, [base.prompt.text], deployment.tokenizer)
    problems = [] if base.gate.ok else [describe_failure(topk)]
    payloads: dict[str, dict[str, Any]] = {"topk_gate": topk}
    if base.inside is not None:
        found = diagnose(base.inside, reference.run(base.prompt.ids, measure.PROBED_TOKENS))
        payloads["diagnosis"] = diagnosis_payload(found, base.prompt.text)
        problems += table_problems(found)
    for section, ms in ((PREFILL, base.prefill_ms), (DECODE, base.decode_ms)):
        if not ms > 0:
            problems.append(f"{section} took {ms} ms on the device clock: nothing was measured")
    payload = {**_head(3, None, base), "steps": [], "status": _status(problems), "problems": problems}
    payload["dispatch"] = {PREFILL: base.prefill.summary(), DECODE: base.decode.summary()}
    payloads["optimisation"] = payload
    return GateOutcome(
        not problems, payload, "phase 3: " + "\n  ".join(problems) if problems else ""
    ), payloads


def table_problems(found: Diagnosis) -> list[str]:
    """What is wrong with a per-layer table as such: odd records, missing rows, values not finite."""
    missing = [f"{row.path}: layer {row.layer} {row.probe} is missing: {row.reason}" for row in found.missing]
    return [*found.problems, *missing]


def prefill_gate(
    deployment: Deployment, reference: HFReference, *, device: AbstractContextManager[Any] | None = None
) -> GateOutcome:
    """Phase 4: multi-launch merge, buffer reuse, compiled length and layout of the prefill."""
    base, merged, final = _forms(deployment, reference, device)
    steps = [*_common(base, merged, final, PREFILL)]
    longer = measure.longer_prefill(deployment, device=device)
    name = "compiled length: the smallest that holds the prompt"
    if longer is None:
        steps.append(Step(name, reason="the prompt needs the longest compiled length"))
    else:
        after = Timed(final.prefill_ms, final.prefill)
        step = _step(f"{name} ({longer.seq_len} to {final.seq_len})", final, None)
        steps.append(_timed(step, Timed(longer.prefill_ms, longer.prefill), after))
    steps.append(attention_layout(deployment.config()))
    return _outcome(4, PREFILL, base, final, steps)


def decode_gate(
    deployment: Deployment, reference: HFReference, *, device: AbstractContextManager[Any] | None = None
) -> GateOutcome:
    """Phase 5: multi-launch merge, buffer reuse and layout of a decode step."""
    base, merged, final = _forms(deployment, reference, device)
    merge, reuse = _common(base, merged, final, DECODE)
    if deployment.config().n_layers == 1:
        reuse = Step(reuse.name, reason="one layer: there is no other one to share buffers with")
    steps = [merge, reuse, cascade_form(deployment.config())]
    return _outcome(5, DECODE, base, final, steps)


def _forms(
    deployment: Deployment, reference: HFReference, device: AbstractContextManager[Any] | None
) -> tuple[Measured, Measured, Measured]:
    forms = (measure.UNFUSED, measure.MERGED, measure.PRODUCTION)
    base, merged, final = (measure.measured(deployment, reference, form, device=device) for form in forms)
    return base, merged, final


def _common(base: Measured, merged: Measured, final: Measured, section: str) -> tuple[Step, Step]:
    return (
        _timed(_step("multi-launch merge", merged, base), _section(base, section), _section(merged, section)),
        _timed(_step("buffer reuse", final, merged), _section(merged, section), _section(final, section)),
    )


def _section(measured: Measured, section: str) -> Timed:
    if section == PREFILL:
        return Timed(measured.prefill_ms, measured.prefill)
    return Timed(measured.decode_ms, measured.decode)


def _step(name: str, after: Measured, before: Measured | None) -> Step:
    equal, unequal = (None, "") if before is None else compare_logits(before, after)
    text = "; ".join(after.gate.reasons)
    return Step(name, topk_ok=after.gate.ok, topk_text=text, equal=equal, unequal=unequal)


def _timed(step: Step, before: Timed, after: Timed) -> Step:
    return replace(step, before=before, after=after)


def _outcome(phase: int, section: str, base: Measured, final: Measured, steps: Sequence[Step]) -> GateOutcome:
    judged = [judge_step(step) for step in steps]
    return phase_outcome(phase, section, base, final, judged)


def phase_outcome(
    phase: int, section: str, base: Measured, final: Measured, judged: Sequence[Judged]
) -> GateOutcome:
    """Verdict of a phase: its steps, the gate on the production form, strictly less time than unfused."""
    problems = [f"{one.step.name}: {text}" for one in judged for text in one.problems]
    before, after = _section(base, section).ms, _section(final, section).ms
    if not base.gate.ok:
        problems.append(f"the unfused baseline fails the token-set gate: {'; '.join(base.gate.reasons)}")
    if not final.gate.ok:
        problems.append(f"the production form fails the token-set gate: {'; '.join(final.gate.reasons)}")
    if not after < before:
        problems.append(f"{section} takes {after:.3f} ms, the unfused baseline {before:.3f} ms")
    if not any(one.status == "applied" for one in judged):
        problems.append("no optimisation is applied")
    payload = {
        **_head(phase, section, base, final),
        "gain_percent": 100 * (1 - after / before) if before else None,
        "steps": [one.payload() for one in judged],
        "status": _status(problems),
        "problems": problems,
    }
    text = f"phase {phase}, {section}:\n  " + "\n  ".join(problems) if problems else ""
    return GateOutcome(not problems, payload, text)


def _head(phase: int, section: str | None, base: Measured, final: Measured | None = None) -> dict[str, Any]:
    return {
        "phase": phase,
        "section": section,
        "clock": base.clock,
        "prompt_tokens": len(base.prompt),
        "seq_len": base.seq_len,
        "runs": list(base.runs),
        "baseline_ms": {PREFILL: base.prefill_ms, DECODE: base.decode_ms},
        "production_ms": None if final is None else {PREFILL: final.prefill_ms, DECODE: final.decode_ms},
    }


def _status(problems: Sequence[str]) -> str:
    return "FAIL" if problems else "OK"
