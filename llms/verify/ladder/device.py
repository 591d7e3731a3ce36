"""Rungs that need no reference: the device against itself, and at its limits.

Each has a capture part that runs while the device is held, and a judging part for afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llms.verify.contract.records import Array, DecodeStepRecord, NpuRunner, PrefillRecord
from llms.verify.gates.payloads import token_text
from llms.verify.ladder.forced import CachedRunner, ForcedCapture, LimitedRunner
from llms.verify.ladder.rungs import Pair, whole_cache
from llms.verify.ladder.stats import kl, ulp_distance, vector_distance
from llms.verify.ladder.thresholds import Thresholds
from llms.verify.ladder.types import Judge, RungResult, not_offered

REPEATED_STEPS = 4
# Decode steps by prompt, further prompts as the last. A prefill is the dearest call of the device, and the
# rung `limits` compares one step with a prefill as well.
CONSISTENCY_STEPS: tuple[tuple[int, ...], ...] = ((31,), ())
_NONE = np.empty(0, np.float32)


def _prefill(runner: NpuRunner, ids: Sequence[int]) -> PrefillRecord:
    return PrefillRecord.copy_of(runner.prefill(np.array(ids, np.int64)))


def _decode(runner: NpuRunner, token: int, position: int) -> DecodeStepRecord:
    return DecodeStepRecord.copy_of(runner.decode_step(int(token), position))


# -- determinism -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Repeat:
    """A prompt run again: logits ``[steps, vocab]``, K and V of its positions."""

    logits: Array
    keys: Array
    values: Array


def repeat_first(runner: NpuRunner, first: ForcedCapture, steps: int = REPEATED_STEPS) -> Repeat:
    """Run the first prompt again through the plain decode step, behind whatever ran since.

    At first it followed on nothing; now it finds what other prompts and longer prefills left.
    """
    rows = [_prefill(runner, first.prompt_ids).logits_at_pred]
    fed = first.fed[:steps]
    for number, token in enumerate(fed):
        rows.append(_decode(runner, token, len(first.prompt_ids) + number).lm_head_logits)
    keys = values = _NONE
    if isinstance(runner, CachedRunner):
        end = len(first.prompt_ids) + len(fed)
        keys, values = (array[:, :, :end].copy() for array in runner.kv_cache())
    return Repeat(np.stack(rows), keys, values)


def determinism(pair: Pair, repeat: Repeat) -> RungResult:
    """A prompt repeated behind others gives identical bits: logits of every step, and the KV cache."""
    judge = Judge("determinism", None)
    for step, (first, again) in enumerate(zip(pair.npu.logits, repeat.logits, strict=False)):
        if first.tobytes() != again.tobytes():
            distance = ulp_distance(first, again)
            token = int(distance.argmax())
            judge.fail(
                f"{pair.at(step)}: repeated, {int((distance > 0).sum())} of {distance.size} logits "
                f"differ, the most at token {token} {token_text(pair.tokenizer, token)!r}: "
                f"{float(first[token]):.6g} then {float(again[token]):.6g}"
            )
            break
    if repeat.keys.size and pair.npu.has_cache:
        keys, values = whole_cache(pair.npu)
        for name, first, again in (("K", keys, repeat.keys), ("V", values, repeat.values)):
            different = (first[:, :, : again.shape[2]] != again).any(-1)
            if different.any():
                layer, head, slot = (int(i) for i in np.argwhere(different)[0])
                judge.fail(
                    f"prompt {pair.index}: repeated, {name} differs in {int(different.sum())} slots, "
                    f"first in layer {layer} head {head} {pair.slot(slot)}"
                )
    return judge.result(f"prompt {pair.index} run again behind other ones: identical bits asked for")


# -- self-consistency --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LongerPrefill:
    """A prefill of a prompt and its first ``step`` fed tokens: last logits, K and V of these slots."""

    index: int
    step: int
    logits: Array
    keys: Array
    values: Array


def longer_prefills(
    runner: NpuRunner,
    captures: Sequence[ForcedCapture],
    steps: Sequence[Sequence[int]] = CONSISTENCY_STEPS,
) -> tuple[LongerPrefill, ...]:
    """Prefill what was decoded before: a prompt with as many of its fed tokens as `steps` has for it."""
    results = []
    for index, capture in enumerate(captures):
        n = len(capture.prompt_ids)
        wanted = {min(step, len(capture.fed)) for step in steps[min(index, len(steps) - 1)]}
        for step in sorted(wanted - {0}):
            record = _prefill(runner, (*capture.prompt_ids, *capture.fed[:step]))
            keys = values = _NONE
            if isinstance(runner, CachedRunner):
                keys, values = (array[:, :, n : n + step].copy() for array in runner.kv_cache())
            results.append(LongerPrefill(index, step, record.logits_at_pred, keys, values))
    return tuple(results)


def self_consistency(
    pairs: Sequence[Pair], longer: Sequence[LongerPrefill], thresholds: Thresholds | None
) -> RungResult:
    """Prefill of n + s tokens against prefill of n and s decode steps, for several s; needs no reference.

    Prefill (block floating point) and decode (f32 sums) differ by design, so the limits are calibrated.
    Statistics: ``kl_max``; for keys and values ``*_drift`` (|median log norm ratio| over all layers) and
    ``*_cosine`` (1 - median cosine of the worst layer). Data: ``checks``: [{index, step, kl}].
    """
    judge = Judge("self_consistency", thresholds)
    rows = []
    for one in longer:
        pair = pairs[one.index]
        where = f"{pair.at(one.step)} against a prefill of as many tokens"
        value = float(kl(one.logits, pair.npu.logits[one.step]))
        judge.see("kl_max", value, where)
        rows.append({"index": one.index, "step": one.step, "kl": value if np.isfinite(value) else None})
        if not one.keys.size or not pair.npu.has_cache:
            continue
        for name, prefilled, decoded in (
            ("key", one.keys, pair.npu.decode_keys),
            ("value", one.values, pair.npu.decode_values),
        ):
            written = decoded[: one.step].transpose(1, 2, 0, 3)
            distance = vector_distance(written, prefilled)
            judge.see(f"{name}_drift", float(abs(np.median(distance.log_ratio))), where)
            medians = 1.0 - np.median(distance.cosine, axis=(1, 2))
            layer = int(np.where(np.isnan(medians), np.inf, medians).argmax())
            judge.see(f"{name}_cosine", float(medians[layer]), f"{where}, layer {layer}")
    return judge.result(f"{len(longer)} prefills against decode steps", {"checks": rows})


# -- limits ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Boundary:
    """One compiled length: decoding across it against prefilling behind it.

    ``logits``: {length: (decoded, prefilled)} for as many tokens in all.
    """

    length: int
    logits: dict[int, tuple[Array, Array]]


@dataclass(frozen=True)
class Refusal:
    """What a call that must be refused did: ``error`` is None when it answered instead."""

    call: str
    length: int
    error: str | None


@dataclass(frozen=True, eq=False)
class LimitsCapture:
    """The device at its limits; ``limits`` empty when the runner does not name them."""

    limits: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    refusals: tuple[Refusal, ...]


def at_limits(runner: NpuRunner, text: Sequence[int], *, up_to: int | None = None) -> LimitsCapture:
    """Run prompts around every compiled length up to ``up_to``, and what lies beyond the largest.

    ``text``: token ids, repeated as often as a length needs.
    """
    if not isinstance(runner, LimitedRunner):
        return LimitsCapture((), (), ())
    limits = tuple(sorted(runner.prompt_limits()))
    past = _take(text, limits[-1] + 1)
    refusals = [Refusal("prefill", len(past), _error(lambda: _prefill(runner, past)))]
    tried = [length for length in limits if up_to is None or length <= up_to]
    boundaries = tuple(across(runner, text, length, limits[-1]) for length in tried)
    if limits[-1] not in tried:
        _prefill(runner, past[:-1])
    # The last prefill filled the cache, so the next position is outside it.
    end = limits[-1]
    refusals.append(Refusal("decode_step", end, _error(lambda: _decode(runner, past[-1], end))))
    return LimitsCapture(limits, boundaries, tuple(refusals))


def _take(text: Sequence[int], length: int) -> list[int]:
    return [int(text[i % len(text)]) for i in range(length)]


def across(runner: NpuRunner, text: Sequence[int], length: int, largest: int) -> Boundary:
    """Decode across one compiled length, then prefill as many tokens; ``text`` as in :func:`at_limits`."""
    ids = _take(text, length + 1)
    _prefill(runner, ids[: length - 1])
    decoded = {length: _decode(runner, ids[length - 1], length - 1).lm_head_logits}
    if length < largest:
        decoded[length + 1] = _decode(runner, ids[length], length).lm_head_logits
    # The prefill of the compiled length itself comes last: it leaves the cache full.
    prefilled = {n: _prefill(runner, ids[:n]).logits_at_pred for n in sorted(decoded, reverse=True)}
    return Boundary(length, {n: (decoded[n], prefilled[n]) for n in sorted(decoded)})


def _error(call: Callable[[], object]) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def limits(captured: LimitsCapture, thresholds: Thresholds | None) -> RungResult:
    """Prompt lengths around every compiled limit, one past the largest, and a decode step past the cache.

    Statistic ``kl_max``: decoding across a compiled length against prefilling as many tokens. What lies
    beyond must be refused with an error that names the number that is too large.
    Data: ``lengths``: [{limit, length, kl}], ``refusals``: [{call, length, error}].
    """
    judge = Judge("limits", thresholds)
    if not captured.limits:
        return not_offered("limits", "prompt_limits (its compiled prompt lengths)")
    rows = []
    for boundary in captured.boundaries:
        for length, (decoded, prefilled) in boundary.logits.items():
            value = float(kl(prefilled, decoded))
            where = f"{length} tokens, compiled length {boundary.length}"
            if not (np.isfinite(decoded).all() and np.isfinite(prefilled).all()):
                judge.fail(f"{where}: logits that are not finite")
            judge.see("kl_max", value, where)
            rows.append(
                {"limit": boundary.length, "length": length, "kl": value if np.isfinite(value) else None}
            )
    for refusal in captured.refusals:
        what = "a prompt of" if refusal.call == "prefill" else "a decode step at position"
        if refusal.error is None:
            judge.fail(
                f"{what} {refusal.length} was answered, the largest compiled length is "
                f"{captured.limits[-1]}: it must be an error, never cut silently"
            )
        elif str(refusal.length) not in refusal.error:
            judge.fail(f"{what} {refusal.length} was refused without naming it: {refusal.error}")
    data = {
        "lengths": rows,
        "refusals": [{"call": r.call, "length": r.length, "error": r.error} for r in captured.refusals],
    }
    tried = ", ".join(str(boundary.length) for boundary in captured.boundaries) or "none"
    return judge.result(f"around compiled lengths {tried}; largest {captured.limits[-1]}", data)
