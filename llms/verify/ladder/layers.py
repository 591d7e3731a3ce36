"""The sharpest rung: every layer on its own, from the device's own inputs.

Each layer of the matched reference is given what the device's layer was given: the hidden state that the
layer before it put out, and the KV cache after the prefill. What then differs is the arithmetic of one layer,
not noise that thirty layers and all positions before have handed on, so a fault of a few percent in one layer
at one step stands out, and the layer is named. All decode steps of a prompt run as rows of one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llms.verify.contract.records import Array
from llms.verify.ladder.rungs import Pair, finite_steps
from llms.verify.ladder.stats import kl, numbers, vector_distance, worst
from llms.verify.ladder.thresholds import Thresholds
from llms.verify.ladder.types import Judge, RungResult, not_offered
from llms.verify.reference.arithmetic import DeviceArithmetic
from llms.verify.reference.matched import MatchedReference


def layer_check(
    pairs: Sequence[Pair],
    arithmetics: Sequence[DeviceArithmetic | None],
    reference: MatchedReference,
    thresholds: Thresholds | None,
) -> RungResult:
    """Prefill and decode steps, layer by layer from the device's own inputs.

    Statistics: ``prefill_output`` and ``decode_output``, the largest error of a layer's output at a position
    relative to what the layer adds to its input; ``prefill_mean`` and ``decode_mean``, its mean over the
    positions of a layer; ``key`` and ``value``, the largest relative error of a new slot; ``logits``, the
    largest KL of final norm and LM head.

    Data: ``prompts``: [{index, text, prefill: [worst output error per layer], decode: likewise}].
    """
    judge = Judge("layer_check", thresholds)
    missing = lacks(pairs, arithmetics)
    if missing:
        return not_offered("layer_check", missing)
    rows = [
        layers_of(judge, pair, arithmetic, reference.model)
        for pair, arithmetic in zip(pairs, arithmetics, strict=True)
    ]
    return judge.result(
        "every layer from the npu's own hidden states and KV cache",
        {"prompts": [row for row in rows if row is not None]},
    )


def lacks(pairs: Sequence[Pair], arithmetics: Sequence[DeviceArithmetic | None]) -> str:
    """The ability that a runner lacks for a check layer by layer; empty when nothing is missing."""
    if not all(pair.npu.has_cache for pair in pairs):
        return "kv_cache (a readable KV cache)"
    if not all(pair.npu.has_layers for pair in pairs):
        return "decode_step_probed (outputs of all layers)"
    if any(arithmetic is None for arithmetic in arithmetics):
        return "device_arithmetic (which arithmetic is deployed)"
    return ""


def layers_of(
    judge: Judge, pair: Pair, arithmetic: DeviceArithmetic | None, model: Any
) -> dict[str, Any] | None:
    """Judge one prompt layer by layer; returns its entry for the report, None when it cannot be compared."""
    assert arithmetic is not None
    n_layers, recorded = len(model.layers), pair.npu.prefill_layers.shape[0]
    if recorded != n_layers:
        judge.fail(f"{pair.at(0)}: the npu recorded {recorded} layers, the model has {n_layers}")
        return None
    finite_steps(judge, pair)
    entry: dict[str, Any] = {"index": pair.index, "text": pair.text, "decode": []}
    entry["prefill"] = numbers(_prefill(judge, pair, arithmetic, model).max(-1))
    if pair.npu.fed:
        entry["decode"] = numbers(_decode(judge, pair, model).max(-1))
    return entry


def _prefill(judge: Judge, pair: Pair, arithmetic: DeviceArithmetic, model: Any) -> Array:
    outputs = pair.npu.prefill_layers.astype(bfloat16)
    n = outputs.shape[1]
    with model.given(outputs) as seen:
        logits = model.prefill(pair.npu.prompt_ids, arithmetic)
    keys, values = model.kv_cache()
    for name, ours, theirs in (
        ("key", pair.npu.prefill_keys, keys),
        ("value", pair.npu.prefill_values, values),
    ):
        value, (layer, head, slot) = worst(vector_distance(ours, theirs).error)
        judge.see(name, value, f"{pair.at(0)}, layer {layer} head {head} {pair.slot(slot)}")
    judge.see("logits", float(kl(logits, pair.npu.logits[0])), f"{pair.at(0)}, final norm and LM head")
    error = _output_errors(outputs, np.stack(seen)[:, :n])
    value, (layer, row) = worst(error)
    judge.see("prefill_output", value, f"{pair.at(0)}, {pair.slot(row)}, output of layer {layer}")
    value, (layer,) = worst(error.mean(-1))
    judge.see("prefill_mean", value, f"{pair.at(0)}, output of layer {layer}, all positions")
    return error


def _decode(judge: Judge, pair: Pair, model: Any) -> Array:
    n = len(pair.npu.prompt_ids)
    outputs = pair.npu.decode_layers.astype(bfloat16).transpose(1, 0, 2)
    found = model.decode_rows(pair.npu.fed, pair.npu.prefill_keys, pair.npu.prefill_values, outputs)
    for name, ours, theirs in (
        ("key", pair.npu.decode_keys, found.keys),
        ("value", pair.npu.decode_values, found.values),
    ):
        value, (layer, head, step) = worst(vector_distance(ours.transpose(1, 2, 0, 3), theirs).error)
        judge.see(name, value, f"{pair.at(step + 1)}, layer {layer} head {head} {pair.slot(n + step)}")
    value, (step,) = worst(kl(found.logits, pair.npu.logits[1:]))
    judge.see("logits", value, f"{pair.at(step + 1)}, final norm and LM head")
    error = _output_errors(outputs, found.outputs)
    value, (layer, step) = worst(error)
    judge.see("decode_output", value, f"{pair.at(step + 1)}, output of layer {layer}")
    value, (layer,) = worst(error.mean(-1))
    judge.see("decode_mean", value, f"prompt {pair.index}, output of layer {layer}, all decode steps")
    return error


def _output_errors(ours: Array, theirs: Array) -> Array:
    """Errors ``[n_layers, n]`` of outputs ``[n_layers, n, emb]``, relative to what a layer adds."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    added = b.copy()
    added[1:] -= a[:-1]
    with np.errstate(invalid="ignore"):
        scale = np.maximum(np.linalg.norm(added, axis=-1), 1e-30)
        error: Array = np.linalg.norm(a - b, axis=-1) / scale
    return error
