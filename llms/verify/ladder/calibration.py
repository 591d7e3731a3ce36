"""Limits for a checkpoint that nobody has measured: taken from the checkpoint itself, never from the device.

Two correct implementations of one arithmetic differ by the order of their f32 sums. What that does to a model
follows no simple law: four tiny models of three and four layers stay below the floors of `thresholds.py`,
SmolLM2-135M with 30 trained layers exceeds them up to fifty times. So the matched reference with its sums in
another order stands in for the device, goes through the very procedures of the ladder, and what it measures
there, times a margin, is the limit. No fault of the device can move it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from llms.verify.ladder.device import LongerPrefill, across, longer_prefills, self_consistency
from llms.verify.ladder.edges import edges
from llms.verify.ladder.forced import ForcedCapture, capture_forced
from llms.verify.ladder.layers import layer_check
from llms.verify.ladder.rungs import Pair, cache_check, plain_reference, teacher_forced
from llms.verify.ladder.stats import kl
from llms.verify.ladder.thresholds import POOLED, Limit, Thresholds, alike, floor_of
from llms.verify.ladder.types import RungResult
from llms.verify.reference.arithmetic import DeviceArithmetic
from llms.verify.reference.cache import source_hash
from llms.verify.reference.matched import MatchedReference
from llms.verify.reference.runner import ReferenceRunner

if TYPE_CHECKING:
    from llms.verify.contract.chat import EncodedPrompt
    from llms.verify.contract.deployment import Deployment
    from llms.verify.reference.hf import ReferenceRun

SEED = 1
# Over 12 made-up models (heads of 24 to 128, with and without QK-norm, biases, host attention) and
# SmolLM2-135M, two prompts at a time, the clean twin measured 0.3 to 1.3 times the calibration in the means,
# 3.2 times in the largest KL of a step, which one flipped rounding decides.
MARGIN = 3.0
MARGINS = {"teacher_forced.kl_max": 8.0, "layer_check.logits": 8.0}
# Two prompts show few of the flips that a rounding at its edge can make, so the largest over steps and slots
# get more room than in a measured model. The clean twin on those models: 0.014 in an output, 0.006 in a norm
# ratio, 1.5e-3 in KL of a step, ties of 2 ULPs.
FLOORS = {
    "cache_check.key_norm": 0.015,
    "cache_check.value_norm": 0.015,
    "layer_check.prefill_output": 0.02,
    "layer_check.decode_output": 0.02,
    "teacher_forced.kl_max": 3e-3,
    "teacher_forced.kl_prefill": 2e-3,
    "teacher_forced.tie_ulps": 4.0,
}
# What a measured value depends on. The reference and its arithmetic are in the key of each run already.
MEASURED_BY = (
    "llms.verify.contract.records",
    "llms.verify.contract.topk",
    "llms.verify.gates.phase6.diagnosis",
    "llms.verify.ladder.calibration",
    "llms.verify.ladder.device",
    "llms.verify.ladder.edges",
    "llms.verify.ladder.forced",
    "llms.verify.ladder.layers",
    "llms.verify.ladder.rungs",
    "llms.verify.ladder.stats",
    "llms.verify.ladder.types",
    "llms.verify.reference.runner",
)


class Calibration:
    """What a second correct implementation measures on the prompts of one ladder.

    ``capture`` before the matched reference is loaded, ``limits`` with it, so that no two models are in
    memory at once. Values are cached on disk under everything they depend on.

    Args:
        deployment: under test; only its references are used.
        prompts: of the ladder.
        plain: runs of plain HF for them, whose tokens are fed.
        made_up: the device's passes of the rung ``edges``, of which only the tokens count.
        arithmetic: what is deployed for a prompt of so many tokens.
    """

    def __init__(
        self,
        deployment: Deployment,
        prompts: Sequence[EncodedPrompt],
        plain: Sequence[ReferenceRun],
        made_up: Sequence[ForcedCapture],
        arithmetic: Callable[[int], DeviceArithmetic],
    ) -> None:
        self._deployment = deployment
        self._prompts = prompts
        self._plain = plain
        self._made_up = made_up
        self._arithmetic = arithmetic
        self._other = deployment.matched_reference(reorder=SEED)
        self._known: dict[str, float] | None = None
        self._captures: tuple[ForcedCapture, ...] = ()
        self._edges: tuple[ForcedCapture, ...] = ()
        self._longer: tuple[LongerPrefill, ...] = ()

    def capture(self) -> None:
        """Run the second implementation, unless its values are known."""
        self._known = self._load()
        if self._known is not None:
            return
        runner = ReferenceRunner(self._other.model, self._arithmetic)
        self._captures = tuple(
            capture_forced(runner, prompt.ids, run.fed)
            for prompt, run in zip(self._prompts, self._plain, strict=True)
        )
        self._edges = _repeated(runner, self._made_up)
        self._longer = longer_prefills(runner, self._captures)
        self._other.release()

    def limits(self, pairs: Sequence[Pair], matched: MatchedReference) -> Thresholds:
        """Limits for every statistic; of ``pairs``, those of the ladder, only the references count."""
        values = self._known
        if values is None:
            values = self._measure(pairs, matched)
            self._store(values)
        return calibrated(values, _source(self._deployment))

    def _measure(self, pairs: Sequence[Pair], matched: MatchedReference) -> dict[str, float]:
        mine = [replace(pair, npu=npu) for pair, npu in zip(pairs, self._captures, strict=True)]
        rungs = measuring_rungs(mine, self._edges, self._longer, self._arithmetic, matched, None)
        return {one.statistic: one.value for rung in rungs for one in rung.measured}

    def _key(self) -> dict[str, Any]:
        runs = [
            self._other.key(prompt.ids, len(run.tokens), self._arithmetic(len(prompt)), run.fed)
            for prompt, run in zip(self._prompts, self._plain, strict=True)
        ]
        tokens = [[list(one.prompt_ids), list(one.fed)] for one in self._made_up]
        return {
            "reference": "calibration",
            "runs": runs,
            "made_up": tokens,
            "measured_by": _procedures_hash(),
        }

    def _load(self) -> dict[str, float] | None:
        cache = self._other.cache
        stored = None if cache is None else cache.load(self._key())
        if stored is None:
            return None
        names = bytes(stored["names"]).decode().split("\n")
        return dict(zip(names, (float(value) for value in stored["values"]), strict=True))

    def _store(self, values: dict[str, float]) -> None:
        cache = self._other.cache
        if cache is not None:
            names = np.frombuffer("\n".join(values).encode(), np.uint8)
            cache.store(self._key(), {"names": names, "values": np.array(list(values.values()), np.float64)})


def measuring_rungs(
    pairs: Sequence[Pair],
    made_up: Sequence[ForcedCapture],
    longer: Sequence[LongerPrefill],
    arithmetic: Callable[[int], DeviceArithmetic | None],
    matched: MatchedReference,
    thresholds: Thresholds | None,
) -> tuple[RungResult, ...]:
    """The rungs whose limits can be calibrated, in the order of the report."""
    arithmetics = [arithmetic(len(pair.npu.prompt_ids)) for pair in pairs]
    return (
        teacher_forced(pairs, thresholds),
        cache_check(pairs, thresholds),
        layer_check(pairs, arithmetics, matched, thresholds),
        edges(made_up, arithmetic, matched, pairs[0].tokenizer, thresholds),
        plain_reference(pairs, thresholds),
        self_consistency(pairs, longer, thresholds),
    )


def calibrated_lengths(
    deployment: Deployment,
    arithmetic: Callable[[int], DeviceArithmetic],
    lengths: Sequence[int],
    text: Sequence[int],
    full: Sequence[ForcedCapture],
) -> Thresholds:
    """Limits of ``limits`` and ``edges`` over compiled lengths: their tokens through a second one."""
    other = deployment.matched_reference(reorder=SEED)
    runner = ReferenceRunner(other.model, arithmetic)
    largest = 0.0
    for length in lengths:
        for decoded, prefilled in across(runner, text, length, max(lengths)).logits.values():
            largest = max(largest, float(kl(prefilled, decoded)))
    mine = _repeated(runner, full)
    other.release()
    matched = deployment.matched_reference()
    inside = edges(mine, arithmetic, matched, deployment.tokenizer, None)
    matched.release()
    values = {one.statistic: one.value for one in inside.measured}
    return calibrated({"limits.kl_max": largest, **values}, _source(deployment))


def _repeated(runner: ReferenceRunner, captures: Sequence[ForcedCapture]) -> tuple[ForcedCapture, ...]:
    return tuple(capture_forced(runner, one.prompt_ids, one.fed) for one in captures)


def _source(deployment: Deployment) -> str:
    return f"{deployment.reference_checkpoint.label}, matched reference with its sums in another order"


def calibrated(values: Mapping[str, float], source: str) -> Thresholds:
    """Limits from what a second correct implementation measured: the value times the margin, or the floor."""
    pooled = {name: values.get(other, 0.0) for name, other in POOLED.items()}
    limits = {}
    for name, value in {**pooled, **values}.items():
        like = alike(name)
        limit = max(MARGINS.get(like, MARGIN) * value, FLOORS.get(like, floor_of(like)))
        limits[name] = Limit(name, limit, value, None, source)
    return Thresholds(limits)


@lru_cache(maxsize=1)
def _procedures_hash() -> str:
    """SHA-256 (hex) over the source of the procedures that measure."""
    return source_hash(MEASURED_BY)
