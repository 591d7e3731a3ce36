"""Rungs that compare a teacher-forced pass of the device with references: logits and KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llms.verify.contract.records import Array
from llms.verify.contract.topk import K, top_k
from llms.verify.gates.payloads import token_text
from llms.verify.ladder.forced import ForcedCapture
from llms.verify.ladder.stats import VectorDistance, kl, numbers, tie_ulps, vector_distance, worst
from llms.verify.ladder.thresholds import Thresholds
from llms.verify.ladder.types import Judge, RungResult, not_offered
from llms.verify.reference.hf import ReferenceRun
from llms.verify.reference.runs import Run


@dataclass(frozen=True, eq=False)
class Pair:
    """One prompt on both sides, and the words to speak of it.

    Attributes:
        index: place of the prompt in its set.
        text: the prompt.
        npu: the device's pass.
        matched: the matched run fed with the same tokens, None when the arithmetic is not described.
        plain: the plain HF run that chose those tokens, None where nobody chose them.
        tokenizer: decodes tokens for messages.
    """

    index: int
    text: str
    npu: ForcedCapture
    matched: Run | None
    plain: ReferenceRun | None
    tokenizer: Any

    @property
    def name(self) -> str:
        """Its index, and the beginning of the prompt."""
        text = self.text if len(self.text) <= 40 else f"{self.text[:39]}…"
        return f"prompt {self.index} ({text!r})"

    def at(self, step: int) -> str:
        """Name a step: 0 is the prefill, step s the decode of token s - 1."""
        where = f"{self.name}, "
        if step == 0:
            return where + "prefill"
        return where + f"decode step {step} (token {token_text(self.tokenizer, self.npu.fed[step - 1])!r})"

    def slot(self, slot: int) -> str:
        """Name a slot of the KV cache with the token that is in it."""
        n = len(self.npu.prompt_ids)
        token = self.npu.prompt_ids[slot] if slot < n else self.npu.fed[slot - n]
        where = "prompt" if slot < n else f"decode step {slot - n + 1}"
        return f"slot {slot} ({where}, token {token_text(self.tokenizer, token)!r})"


def finite_steps(judge: Judge, pair: Pair) -> bool:
    """Fail for every step with logits that are not finite; True when there is none."""
    bad = np.flatnonzero(~np.isfinite(pair.npu.logits).all(-1))
    for step in bad:
        judge.fail(f"{pair.at(int(step))}: the npu's logits are not finite")
    return not bad.size


def _divergence(judge: Judge, pair: Pair, reference: Run | None, whose: str) -> Array | None:
    """KL(reference || npu) of every step, its mean and largest judged; None when it cannot be compared."""
    if reference is None or not finite_steps(judge, pair):
        return None
    if reference.logits.shape != pair.npu.logits.shape:
        sizes = f"the npu has logits {pair.npu.logits.shape}, {whose} {reference.logits.shape}"
        judge.fail(f"{pair.at(0)}: {sizes}")
        return None
    steps = kl(reference.logits, pair.npu.logits)
    judge.see("kl_mean", float(steps.mean()), pair.name)
    value, (step,) = worst(steps)
    judge.see("kl_max", value, pair.at(step))
    return steps


def teacher_forced(pairs: Sequence[Pair], thresholds: Thresholds | None) -> RungResult:
    """Both sides fed the same tokens through the decode path, logits against the matched reference.

    Statistics: ``kl_mean``, ``kl_median`` (per prompt), ``kl_max`` (per step) and ``kl_prefill`` of
    KL(ref || npu), ``tie_ulps``: how clearly the sides disagree where their first tokens differ. The
    reference's first token must be in the npu's top 5 at every step.

    Data: ``prompts``: [{index, text, kl: [per step], top1_agreement, tokens: [{step, reference, npu,
    ulps}]}].
    """
    judge = Judge("teacher_forced", thresholds)
    if any(pair.matched is None for pair in pairs):
        return not_offered("teacher_forced", "device_arithmetic (which arithmetic is deployed)")
    rows = []
    for pair in pairs:
        steps = _divergence(judge, pair, pair.matched, "the reference")
        if pair.matched is None or steps is None:
            continue
        judge.see("kl_median", float(np.median(steps)), pair.name)
        judge.see("kl_prefill", float(steps[0]), pair.at(0))
        reference, npu = pair.matched.logits.astype(np.float32), pair.npu.logits.astype(np.float32)
        chosen = _choices(judge, pair, reference, npu)
        rows.append({"index": pair.index, "text": pair.text, "kl": steps.tolist(), **chosen})
    n = sum(len(pair.npu.tokens) for pair in pairs)
    return judge.result(f"{n} steps of {len(pairs)} prompts against the matched reference", {"prompts": rows})


def _choices(judge: Judge, pair: Pair, reference: Array, npu: Array) -> dict[str, Any]:
    apart = []
    judge.see("tie_ulps", 0.0, pair.at(0))
    for step in range(len(npu)):
        first, ours = int(np.argmax(reference[step])), int(np.argmax(npu[step]))
        if pair.npu.tokens[step] != ours:
            judge.fail(f"{pair.at(step)}: the npu chose {pair.npu.tokens[step]}, its own logits say {ours}")
        if first == ours:
            continue
        names = [token_text(pair.tokenizer, token) for token in (first, ours)]
        ulps = tie_ulps(reference[step], npu[step], first, ours)
        told = f"{pair.at(step)}: reference {first} {names[0]!r}, npu {ours} {names[1]!r}"
        judge.see("tie_ulps", ulps, told)
        apart.append({"step": step, "reference": names[0], "npu": names[1], "ulps": ulps})
        if first not in top_k(npu[step], K):
            judge.fail(f"{told}: the reference's token is not in the npu's top {K}")
    return {"top1_agreement": 1.0 - len(apart) / len(npu), "tokens": apart}


def plain_reference(pairs: Sequence[Pair], thresholds: Thresholds | None) -> RungResult:
    """The same pass against plain HF bf16: a coarse limit, as the number formats alone cost this much.

    Statistics: ``kl_mean``, ``kl_max``. Data: ``prompts``: [{index, text, kl, top1_agreement, cache_trend:
    median cosine of K and V per layer or None}].
    """
    judge = Judge("plain_reference", thresholds)
    rows = []
    for pair in pairs:
        steps = _divergence(judge, pair, pair.plain, "plain HF")
        if pair.plain is None or steps is None:
            continue
        same = pair.plain.logits.astype(np.float32).argmax(-1) == pair.npu.logits.astype(np.float32).argmax(
            -1
        )
        found = {"top1_agreement": float(same.mean()), "cache_trend": _trend(pair)}
        rows.append({"index": pair.index, "text": pair.text, "kl": steps.tolist(), **found})
    return judge.result(f"{len(pairs)} prompts against plain HF bf16, a coarse limit", {"prompts": rows})


def _trend(pair: Pair) -> dict[str, list[float]] | None:
    if not pair.npu.has_cache or pair.plain is None or pair.plain.keys.size == 0:
        return None
    trend = {}
    for name, ours, reference in _caches(pair, pair.plain.keys, pair.plain.values):
        if ours.shape != reference.shape:
            return None
        cosine = vector_distance(ours, reference).cosine
        trend["keys" if name == "key" else "values"] = [float(np.median(layer)) for layer in cosine]
    return trend


def whole_cache(npu: ForcedCapture) -> tuple[Array, Array]:
    """K and V of all positions, ``[n_layers, n_kv_heads, n + T - 1, head_dim]``, as each slot was written."""
    joined = []
    for prefill, decode in ((npu.prefill_keys, npu.decode_keys), (npu.prefill_values, npu.decode_values)):
        joined.append(np.concatenate([prefill, decode.transpose(1, 2, 0, 3)], axis=2))
    return joined[0], joined[1]


def _caches(pair: Pair, keys: Array, values: Array) -> list[tuple[str, Array, Array]]:
    ours = whole_cache(pair.npu)
    return [("key", ours[0], keys), ("value", ours[1], values)]


def cache_check(pairs: Sequence[Pair], thresholds: Thresholds | None) -> RungResult:
    """KV cache after the prefill and after every decode step against the matched reference's.

    Per layer, head and slot. Statistics for keys and values: ``*_cosine`` (1 - lowest cosine), ``*_norm``
    (largest |log norm ratio|), ``*_prefill_drift`` and ``*_decode_drift`` (largest |median log norm ratio| of
    a layer: a common factor), ``*_prefill_error`` and ``*_decode_error`` (mean relative error of a layer),
    ``*_first`` (largest relative error in the first layer, which depends on nothing but embedding, norm,
    projection and position). No decode
    step may change a slot before its own.

    Data (heat maps): ``prompts``: [{index, text, key_min_cosine, value_min_cosine, key_worst_ratio,
    value_worst_ratio: each [layer][head]}], ratios as |npu| / |reference|.
    """
    judge = Judge("cache_check", thresholds)
    if not all(pair.npu.has_cache for pair in pairs):
        return not_offered("cache_check", "kv_cache (a readable KV cache)")
    if any(pair.matched is None for pair in pairs):
        return not_offered("cache_check", "device_arithmetic (which arithmetic is deployed)")
    maps = []
    for pair in pairs:
        assert pair.matched is not None
        for slot in pair.npu.clobbered:
            judge.fail(
                f"{pair.at(slot.step + 1)}: changed {slot.which} of layer {slot.layer} head {slot.head} "
                f"{pair.slot(slot.slot)} ({pair.npu.clobbered_count} slots in all), "
                f"a step may only write its own slot {len(pair.npu.prompt_ids) + slot.step}"
            )
        entry: dict[str, Any] = {"index": pair.index, "text": pair.text}
        for name, ours, reference in _caches(pair, pair.matched.keys, pair.matched.values):
            if ours.shape != reference.shape:
                judge.fail(
                    f"prompt {pair.index}: {name}s of the npu are {ours.shape}, "
                    f"of the reference {reference.shape}"
                )
                continue
            distance = vector_distance(ours, reference)
            _judge_cache(judge, pair, name, distance)
            extreme = np.abs(distance.log_ratio).argmax(-1)[..., None]
            ratio = np.take_along_axis(distance.log_ratio, extreme, -1)[..., 0]
            entry[f"{name}_min_cosine"] = numbers(distance.cosine.min(-1))
            entry[f"{name}_worst_ratio"] = numbers(np.exp(ratio))
        maps.append(entry)
    return judge.result("K and V per layer, head and slot against the matched reference", {"prompts": maps})


def _judge_cache(judge: Judge, pair: Pair, name: str, distance: VectorDistance) -> None:
    def place(index: tuple[int, ...]) -> str:
        layer, head, slot = index
        return (
            f"{pair.name}, layer {layer} head {head} {pair.slot(slot)}: "
            f"cosine {distance.cosine[index]:.4f}, norm ratio {np.exp(distance.log_ratio[index]):.4f}"
        )

    value, index = worst(1.0 - distance.cosine)
    judge.see(f"{name}_cosine", value, place(index))
    value, index = worst(np.abs(distance.log_ratio))
    judge.see(f"{name}_norm", value, place(index))
    value, index = worst(distance.error[:1])
    judge.see(f"{name}_first", value, place(index))
    n = len(pair.npu.prompt_ids)
    for phase, part in (("prefill", np.s_[:, :, :n]), ("decode", np.s_[:, :, n:])):
        ratios, errors = distance.log_ratio[part], distance.error[part]
        if ratios.shape[2] == 0:
            continue
        for statistic, per_layer in (
            ("drift", np.abs(np.median(ratios, axis=(1, 2)))),
            ("error", errors.mean((1, 2))),
        ):
            value, (layer,) = worst(per_layer)
            where = f"{pair.name}, layer {layer}, {phase} slots"
            judge.see(f"{name}_{phase}_{statistic}", value, where)
