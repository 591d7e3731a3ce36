"""The gate ladder above the token-set gate: one call runs every rung that the adapter's abilities allow.

    outcome = ladder.run_ladder(deployment, deployment.hf_reference(), deployment.prompts(2))
    assert outcome.ok, outcome.message

Payloads for reports (``outcome.payloads``, kind -> JSON-able dict):

* ``ladder``: {"rungs": [{name, status ("passed" | "failed" | "not offered"), reason, measured: [{statistic,
  value, where, limit, pedigree, ok}], failures: [text]}], "prompts": [text], "n_tokens"}
* ``teacher_forced``: {"prompts": [{index, text, kl: [per step], top1_agreement, tokens: [{step, reference,
  npu, ulps}]}]}; ``plain_reference``: the same against plain HF, without ``tokens``, with ``cache_trend``
* ``cache_check``: {"prompts": [{index, text, key_min_cosine, value_min_cosine, key_worst_ratio,
  value_worst_ratio: [layer][head]}]}: heat maps
* ``layer_check``, ``edges``: {"prompts": [{index, text, prefill: [per layer], decode: [per layer]}]}
* ``self_consistency``: {"checks": [{index, step, kl}]}; ``limits``: {"lengths": [..], "refusals": [..]}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import Deployment
from llms.verify.contract.records import NpuRunner
from llms.verify.contract.topk import N_TOKENS
from llms.verify.ladder.calibration import Calibration, calibrated_lengths
from llms.verify.ladder.device import (
    LimitsCapture,
    LongerPrefill,
    Repeat,
    at_limits,
    determinism,
    limits,
    longer_prefills,
    repeat_interleaved,
    self_consistency,
)
from llms.verify.ladder.edges import capture_edges, edges, full_lengths
from llms.verify.ladder.forced import ForcedCapture, capture_forced
from llms.verify.ladder.layers import layer_check
from llms.verify.ladder.rungs import Pair, cache_check, plain_reference, teacher_forced
from llms.verify.ladder.thresholds import Thresholds
from llms.verify.ladder.types import RungResult, joined
from llms.verify.reference.arithmetic import DescribedRunner, DeviceArithmetic
from llms.verify.reference.hf import HFReference
from llms.verify.reference.matched import MatchedReference

RUNGS = (
    "teacher_forced",
    "cache_check",
    "layer_check",
    "edges",
    "plain_reference",
    "self_consistency",
    "determinism",
    "limits",
)
"""All rungs above the token-set gate, in the order of the report."""

REFERENCE_RUNGS = RUNGS[:5]
"""Those that compare with a reference."""


@dataclass(frozen=True)
class LadderOutcome:
    """Outcome of all rungs.

    ``ok``: no rung failed and at least one passed. ``payloads``: see the module. ``message``: the failures.
    """

    rungs: tuple[RungResult, ...]
    payloads: dict[str, dict[str, Any]]

    @property
    def ok(self) -> bool:
        """Whether no rung failed; a ladder of which nothing was offered is no pass."""
        return all(rung.ok for rung in self.rungs) and any(rung.status == "passed" for rung in self.rungs)

    @property
    def message(self) -> str:
        """Text of all failed rungs, then one line on the others."""
        failed = [rung.message() for rung in self.rungs if not rung.ok]
        others = [f"{rung.name} {rung.status}" for rung in self.rungs if rung.ok]
        return "\n".join([*failed, "other rungs: " + ", ".join(others)])

    def rung(self, name: str) -> RungResult:
        """Return one rung by name."""
        return next(rung for rung in self.rungs if rung.name == name)

    def payloads_of(self, name: str) -> dict[str, dict[str, Any]]:
        """The payloads of one rung: ``ladder`` with this rung alone, and its detail if it has one."""
        ladder = self.payloads["ladder"]
        mine = {"ladder": {**ladder, "rungs": [rung for rung in ladder["rungs"] if rung["name"] == name]}}
        return {**mine, name: self.payloads[name]} if name in self.payloads else mine


@dataclass(frozen=True, eq=False)
class DeviceSide:
    """Everything the ladder asks of the device, captured in one section."""

    captures: tuple[ForcedCapture, ...]
    edges: tuple[ForcedCapture, ...]
    repeats: tuple[Repeat, ...]
    longer: tuple[LongerPrefill, ...]
    at_limits: LimitsCapture


def run_ladder(
    deployment: Deployment,
    reference: HFReference,
    prompts: Sequence[EncodedPrompt],
    n_tokens: int = N_TOKENS,
    *,
    device: AbstractContextManager[Any] | None = None,
    thresholds: Thresholds | None = None,
    matched: MatchedReference | None = None,
    limits_up_to: int | None = None,
) -> LadderOutcome:
    """Run all rungs over ``prompts`` and judge them by the limits of the checkpoint.

    These are the recorded ones where this very checkpoint was measured, else what `Calibration` finds for it
    on the same prompts. Both sides are fed the tokens that the plain reference chose, which the token-set
    gate has computed already. ``device`` is held while the device works only. ``limits_up_to`` bounds the compiled lengths that are tried (default: all of
    those that hold prompt and generation).
    """
    if not prompts:
        raise ValueError("the ladder needs at least one prompt")
    known = thresholds if thresholds is not None else Thresholds.recorded(deployment.reference_checkpoint)
    return judge_ladder(
        deployment,
        reference,
        prompts,
        n_tokens,
        known,
        device=device,
        matched=matched,
        up_to=limits_up_to,
        calibrate=known is None,
    )


_climbed: WeakKeyDictionary[Deployment, dict[Any, LadderOutcome]] = WeakKeyDictionary()


def climb(
    deployment: Deployment,
    reference: HFReference,
    prompts: Sequence[EncodedPrompt],
    n_tokens: int = N_TOKENS,
    *,
    device: AbstractContextManager[Any] | None = None,
) -> LadderOutcome:
    """As :func:`run_ladder`, once per deployment, prompts and process: for a test per rung.

    The rungs share one pass of the device. An error is not kept, so the next test tries again. Whoever
    changes the device between two calls (a planted fault) calls :func:`run_ladder`.
    """
    key = (tuple(prompt.ids for prompt in prompts), n_tokens)
    known = _climbed.setdefault(deployment, {})
    if key not in known:
        known[key] = run_ladder(deployment, reference, prompts, n_tokens, device=device)
    return known[key]


def compiled_lengths(
    deployment: Deployment,
    text: Sequence[int],
    up_to: int,
    *,
    device: AbstractContextManager[Any] | None = None,
    thresholds: Thresholds | None = None,
    matched: MatchedReference | None = None,
) -> RungResult:
    """The rungs ``limits`` and ``edges`` over all compiled lengths up to ``up_to``, with a KV cache as long.

    A model of a shorter context is tried up to that. ``text``: token ids, repeated as often as a length
    needs; the prompts that fill a length are made up. Returns ``limits`` with what ``edges`` found as well.
    """
    known = thresholds if thresholds is not None else Thresholds.recorded(deployment.reference_checkpoint)
    runner = deployment.runner(min(up_to, getattr(deployment.config(), "max_position", up_to)))
    with _held(deployment, runner, (), device, keep=False):
        captured = at_limits(runner, text)
        full = full_lengths(runner, _vocabulary(deployment), captured.limits)
    if known is None:
        known = _calibrated_limits(deployment, runner, captured, full, text)
    reference = matched if matched is not None else deployment.matched_reference()
    inside = edges(full, lambda n: _arithmetic(runner, n), reference, deployment.tokenizer, known)
    if matched is None:
        reference.release()
    return joined(limits(captured, known), inside)


def judge_ladder(
    deployment: Deployment,
    reference: HFReference,
    prompts: Sequence[EncodedPrompt],
    n_tokens: int,
    thresholds: Thresholds | None,
    *,
    device: AbstractContextManager[Any] | None = None,
    matched: MatchedReference | None = None,
    up_to: int | None = None,
    keep_runners: bool = False,
    keep_reference: bool = False,
    max_seq: int | None = None,
    calibrate: bool = False,
) -> LadderOutcome:
    """As :func:`run_ladder`; without thresholds it calibrates the checkpoint, or only measures."""
    plain = [reference.run(prompt.ids, n_tokens) for prompt in prompts]
    reference.release()
    if max_seq is None:
        max_seq = max(len(prompt) for prompt in prompts) + n_tokens
    runner = deployment.runner(max_seq)
    arithmetics = [_arithmetic(runner, len(prompt)) for prompt in prompts]
    with _held(deployment, runner, prompts, device, keep_runners):
        vocab_size = plain[0].logits.shape[-1]
        side = capture_device(runner, prompts, [run.fed for run in plain], vocab_size, up_to)
    second = None
    if calibrate and isinstance(runner, DescribedRunner):
        second = Calibration(deployment, prompts, plain, side.edges, runner.device_arithmetic)
        second.capture()
    elif calibrate:
        thresholds = Thresholds.for_checkpoint(deployment.name, deployment.checkpoint)
    if matched is None:
        matched = deployment.matched_reference()
    pairs = []
    for index, (prompt, run, capture) in enumerate(zip(prompts, plain, side.captures, strict=True)):
        arithmetic = arithmetics[index]
        other = None
        if arithmetic is not None:
            other = matched.run(prompt.ids, n_tokens, arithmetic=arithmetic, forced=run.fed)
        pairs.append(Pair(index, prompt.text, capture, other, run, deployment.tokenizer))
    if second is not None:
        thresholds = second.limits(pairs, matched)
    rungs = (
        teacher_forced(pairs, thresholds),
        cache_check(pairs, thresholds),
        layer_check(pairs, arithmetics, matched, thresholds),
        edges(side.edges, lambda n: _arithmetic(runner, n), matched, deployment.tokenizer, thresholds),
        plain_reference(pairs, thresholds),
        self_consistency(pairs, side.longer, thresholds),
        determinism(pairs, side.repeats),
        limits(side.at_limits, thresholds),
    )
    if not keep_reference:
        matched.release()
    return LadderOutcome(rungs, _payloads(rungs, prompts, n_tokens))


def capture_device(
    runner: NpuRunner,
    prompts: Sequence[EncodedPrompt],
    forced: Sequence[Sequence[int]],
    vocab_size: int,
    up_to: int | None,
) -> DeviceSide:
    """Run everything that the rungs want from the device.

    Repeated prompts come last: whatever the device does wrong after a number of calls, or after a prompt of
    another kind, is then in front of them.
    """
    captures = tuple(
        capture_forced(runner, prompt.ids, fed) for prompt, fed in zip(prompts, forced, strict=True)
    )
    made_up = capture_edges(runner, vocab_size)
    longer = longer_prefills(runner, captures)
    text = [token for capture in captures for token in (*capture.prompt_ids, *capture.fed)]
    lengths = at_limits(runner, text, up_to=up_to)
    return DeviceSide(captures, made_up, repeat_interleaved(runner, captures), longer, lengths)


@contextmanager
def _held(
    deployment: Deployment,
    runner: NpuRunner,
    prompts: Sequence[EncodedPrompt],
    device: AbstractContextManager[Any] | None,
    keep: bool,
) -> Iterator[None]:
    """Compile and preload first, then hold the device until its contexts are closed."""
    prepare = getattr(runner, "prepare", None)
    if callable(prepare):
        limits_of = getattr(runner, "prompt_limits", tuple)
        for length in sorted({*(len(prompt) for prompt in prompts), *limits_of()}):
            prepare(length)
    with device if device is not None else nullcontext():
        try:
            yield
        finally:
            if not keep:
                deployment.release_runners()


def _calibrated_limits(
    deployment: Deployment,
    runner: NpuRunner,
    captured: LimitsCapture,
    full: Sequence[ForcedCapture],
    text: Sequence[int],
) -> Thresholds:
    if not isinstance(runner, DescribedRunner):
        return Thresholds.for_checkpoint(deployment.name, deployment.checkpoint)
    lengths = [boundary.length for boundary in captured.boundaries]
    return calibrated_lengths(deployment, runner.device_arithmetic, lengths, text, full)


def _vocabulary(deployment: Deployment) -> int:
    """Rows of the embedding; an adapter's configuration need not state them."""
    stated = getattr(deployment.config(), "vocab_size", None)
    return int(stated) if stated is not None else len(deployment.tokenizer)


def _arithmetic(runner: NpuRunner, prompt_len: int) -> DeviceArithmetic | None:
    return runner.device_arithmetic(prompt_len) if isinstance(runner, DescribedRunner) else None


def _payloads(
    rungs: Sequence[RungResult], prompts: Sequence[EncodedPrompt], n_tokens: int
) -> dict[str, dict[str, Any]]:
    payloads: dict[str, dict[str, Any]] = {
        "ladder": {
            "rungs": [rung.as_dict() for rung in rungs],
            "prompts": [prompt.text for prompt in prompts],
            "n_tokens": n_tokens,
        }
    }
    for rung in rungs:
        if rung.data:
            payloads[rung.name] = dict(rung.data)
    return payloads
