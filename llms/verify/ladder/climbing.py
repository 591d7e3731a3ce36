"""The gate ladder above the token-set gate: one object runs every rung that the adapter's abilities allow.

    outcome = Ladder(deployment, deployment.hf_reference(), deployment.prompts(2)).climb()
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
from contextlib import contextmanager
from dataclasses import dataclass

from llms.verify.contract.abilities import offered
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import NO_DEVICE, Deployment, Device
from llms.verify.contract.records import NpuRunner
from llms.verify.contract.topk import N_TOKENS
from llms.verify.ladder.calibration import Calibration, calibrated_lengths, measuring_rungs
from llms.verify.ladder.device import (
    LimitsCapture,
    LongerPrefill,
    Repeat,
    at_limits,
    determinism,
    limits,
    longer_prefills,
    repeat_first,
)
from llms.verify.ladder.edges import capture_edges, edges, full_lengths
from llms.verify.ladder.forced import ForcedCapture, capture_forced
from llms.verify.ladder.rungs import Pair
from llms.verify.ladder.thresholds import Thresholds
from llms.verify.ladder.types import LadderOutcome, RungResult, joined
from llms.verify.reference.arithmetic import DescribedRunner, DeviceArithmetic
from llms.verify.reference.hf import HFReference, ReferenceRun
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


@dataclass(frozen=True, eq=False)
class DeviceSide:
    """Everything the ladder asks of the device, captured in one section."""

    captures: tuple[ForcedCapture, ...]
    edges: tuple[ForcedCapture, ...]
    repeat: Repeat
    longer: tuple[LongerPrefill, ...]
    at_limits: LimitsCapture


@dataclass(frozen=True, eq=False)
class Ladder:
    """The rungs over ``prompts``, judged by the limits of the checkpoint.

    Both sides are fed the tokens that the plain reference chose, which the token-set gate has computed.

    Attributes:
        deployment, reference: both sides.
        prompts: at least one.
        n_tokens: length of the generation, the token of the prefill included.
        device: held while the device works only.
        thresholds: limits instead of the recorded ones of this very checkpoint or, where it was never
            measured, of what `Calibration` finds for it on the same prompts.
        matched: a matched reference to share, which stays loaded; without it one is made and released.
        limits_up_to: bounds the compiled lengths that are tried (default: all of those that hold prompt and
            generation).

    Raises:
        ValueError: no prompt.
    """

    deployment: Deployment
    reference: HFReference
    prompts: Sequence[EncodedPrompt]
    n_tokens: int = N_TOKENS
    device: Device = NO_DEVICE
    thresholds: Thresholds | None = None
    matched: MatchedReference | None = None
    limits_up_to: int | None = None

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("the ladder needs at least one prompt")

    def climb(self) -> LadderOutcome:
        """Run and judge all rungs."""
        thresholds = self._known_limits()
        longest = max(len(prompt) for prompt in self.prompts) + self.n_tokens
        runner, plain, side = self._capture(longest, keep=False)
        second = None
        if thresholds is None and isinstance(runner, DescribedRunner):
            second = Calibration(self.deployment, self.prompts, plain, side.edges, runner.device_arithmetic)
            second.capture()
        elif thresholds is None:
            thresholds = Thresholds.for_checkpoint(self.deployment.name, self.deployment.checkpoint)
        with self._matched() as matched:
            pairs = self._pairs(runner, plain, side, matched)
            if second is not None:
                thresholds = second.limits(pairs, matched)
            return self._judge(runner, pairs, side, matched, thresholds)

    def climb_once(self, *, retry: bool = False) -> LadderOutcome:
        """As :meth:`climb`, once per deployment, prompts and length: the tests of all rungs judge one pass.

        An error is raised again without a second pass unless ``retry``. Whoever changes the device between
        two calls (a planted fault) calls :meth:`climb`.
        """
        key = ("ladder", tuple(prompt.ids for prompt in self.prompts), self.n_tokens)
        return self.deployment.once(key, self.climb, retry=retry)

    def measure(self, max_seq: int) -> LadderOutcome:
        """All statistics without limits: that is how limits are found. The runner stays open."""
        runner, plain, side = self._capture(max_seq, keep=True)
        with self._matched() as matched:
            return self._judge(runner, self._pairs(runner, plain, side, matched), side, matched, None)

    def over_lengths(self, up_to: int) -> RungResult:
        """The rungs ``limits`` and ``edges`` over all compiled lengths up to ``up_to``, the KV cache as long.

        A model of a shorter context is tried up to that. The first prompt is repeated as often as a length
        needs; other prompts that fill a length are made up. Returns ``limits`` with what ``edges`` found.
        """
        thresholds, text = self._known_limits(), self.prompts[0].ids
        max_seq = min(up_to, getattr(self.deployment.config(), "max_position", up_to))
        with self._on_device(max_seq, ()) as runner:
            captured = at_limits(runner, text)
            # An adapter's configuration need not state the rows of its embedding.
            stated = getattr(self.deployment.config(), "vocab_size", None)
            vocab_size = int(stated) if stated is not None else len(self.deployment.tokenizer)
            full = full_lengths(runner, vocab_size, captured.limits)
        if thresholds is None and isinstance(runner, DescribedRunner):
            lengths = [boundary.length for boundary in captured.boundaries]
            thresholds = calibrated_lengths(self.deployment, runner.device_arithmetic, lengths, text, full)
        elif thresholds is None:
            thresholds = Thresholds.for_checkpoint(self.deployment.name, self.deployment.checkpoint)
        with self._matched() as matched:
            tokenizer = self.deployment.tokenizer
            inside = edges(full, lambda n: _arithmetic(runner, n), matched, tokenizer, thresholds)
        return joined(limits(captured, thresholds), inside)

    def _known_limits(self) -> Thresholds | None:
        if self.thresholds is not None:
            return self.thresholds
        return Thresholds.recorded(self.deployment.reference_checkpoint)

    @contextmanager
    def _matched(self) -> Iterator[MatchedReference]:
        if self.matched is not None:
            yield self.matched
            return
        own = self.deployment.matched_reference()
        try:
            yield own
        finally:
            own.release()

    @contextmanager
    def _on_device(
        self, max_seq: int, prompts: Sequence[EncodedPrompt], *, keep: bool = False
    ) -> Iterator[NpuRunner]:
        """Hold the device, prepared for the prompts and for every compiled length that is tried."""
        known = offered(self.deployment.runner(max_seq), "prompt_limits")
        lengths = [*(len(prompt) for prompt in prompts), *(known() if known is not None else ())]
        with self.deployment.on_device(self.device, lengths, max_seq=max_seq, keep=keep) as runner:
            yield runner

    def _capture(self, max_seq: int, *, keep: bool) -> tuple[NpuRunner, list[ReferenceRun], DeviceSide]:
        plain = [self.reference.run(prompt.ids, self.n_tokens) for prompt in self.prompts]
        self.reference.release()
        vocab_size = plain[0].logits.shape[-1]
        forced = [run.fed for run in plain]
        with self._on_device(max_seq, self.prompts, keep=keep) as runner:
            side = capture_device(runner, self.prompts, forced, vocab_size, self.limits_up_to)
        return runner, plain, side

    def _pairs(
        self, runner: NpuRunner, plain: Sequence[ReferenceRun], side: DeviceSide, matched: MatchedReference
    ) -> list[Pair]:
        pairs = []
        for index, (prompt, run, capture) in enumerate(zip(self.prompts, plain, side.captures, strict=True)):
            arithmetic, other = _arithmetic(runner, len(prompt)), None
            if arithmetic is not None:
                other = matched.run(prompt.ids, self.n_tokens, arithmetic=arithmetic, forced=run.fed)
            pairs.append(Pair(index, prompt.text, capture, other, run, self.deployment.tokenizer))
        return pairs

    def _judge(
        self,
        runner: NpuRunner,
        pairs: Sequence[Pair],
        side: DeviceSide,
        matched: MatchedReference,
        thresholds: Thresholds | None,
    ) -> LadderOutcome:
        rungs = (
            *measuring_rungs(
                pairs, side.edges, side.longer, lambda n: _arithmetic(runner, n), matched, thresholds
            ),
            determinism(pairs[0], side.repeat),
            limits(side.at_limits, thresholds),
        )
        return LadderOutcome.of(rungs, self.prompts, self.n_tokens)


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
    return DeviceSide(captures, made_up, repeat_first(runner, captures[0]), longer, lengths)


def _arithmetic(runner: NpuRunner, prompt_len: int) -> DeviceArithmetic | None:
    return runner.device_arithmetic(prompt_len) if isinstance(runner, DescribedRunner) else None
