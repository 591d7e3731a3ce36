"""Faults of the loop around the layers: positions, KV cache, attention on the host, state between prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from ml_dtypes import bfloat16

import llms.llama_kernel_builder.deployment.session as session_module
from llms.faults.seams import (
    CACHE,
    EXAMPLES,
    Array,
    around,
    attention,
    decode,
    fault,
    layers,
    middle,
    prefill,
    steps,
    token_text,
    tokenizer_files,
)
from llms.llama_kernel_builder import llama_loop
from llms.llama_kernel_builder.deployment import production
from llms.llama_kernel_builder.layer import LayerRun
from llms.llama_kernel_builder.llama_loop import Pass
from npu_twin.faults._types import Fault, Plant


def _skip_layer() -> Plant:
    def in_prefill(right: Any, forward: Pass, run: LayerRun, x: Array) -> Any:
        out, k, v = right(run, x)
        return (x, k, v) if run.index == middle(forward.config) else (out, k, v)

    def in_decode(right: Any, forward: Pass, run: LayerRun, x: Array) -> Any:
        out = right(run, x)
        return x if run.index == middle(forward.config) else out

    return layers(in_prefill, in_decode)


def _slot_late(right: Any, forward: Pass, x: Array, run: Any) -> Any:
    """Written one slot late, at the right angle; the hole is attended to."""
    late = forward.position + 1
    if late >= forward.cache.k.shape[2]:
        return right(forward, x, run)
    table = np.roll(forward.rope_lut, 1, axis=0)
    return right(replace(forward, rope_lut=table, position=late), x, run)


def _position_late(right: Any, forward: Pass, x: Array, run: Any) -> Any:
    return right(replace(forward, rope_lut=np.roll(forward.rope_lut, -1, axis=0)), x, run)


def _late_fault(step: int, right: Any, *arguments: Any) -> Any:
    """Right up to the tenth decode step after a prefill, one position late from then on."""
    return right(*arguments) if step <= 10 else _position_late(right, *arguments)


def _open_tail(q: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    """Attend to 64 slots behind the position as well, as far as the cache goes."""
    room = keys.strides[0] // keys.strides[1]
    shape = (keys.shape[0], min(room, keys.shape[1] + 64), keys.shape[2])
    wide = [np.lib.stride_tricks.as_strided(x, shape, x.strides) for x in (keys, values)]
    return q, wide[0], wide[1]


def _hole(q: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    """One slot of the prompt reads as zero, the cache itself is right."""
    keys, values = keys.copy(), values.copy()
    slot = min(20, keys.shape[1] - 1)
    keys[:, slot], values[:, slot] = 0, 0
    return q, keys, values


def _short_window(q: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    """The first slot is out of sight."""
    return q, keys[:, 1:], values[:, 1:]


def _louder_query(q: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    return (q.astype(np.float32) * 1.05).astype(bfloat16), keys, values


def _swapped_layout(right: Any, forward: Pass, ids: Any, *runs: Any) -> Any:
    """K and V stored as [token, head] where [head, token] is read."""
    result = right(forward, ids, *runs)
    n = len(ids)
    for array in (forward.cache.k, forward.cache.v):
        layers, kv, _, d = array.shape
        tokens_first = np.ascontiguousarray(array[:, :, :n].transpose(0, 2, 1, 3))
        array[:, :, :n] = tokens_first.reshape(layers, kv, n, d)
    return result


def _clobber(right: Any, forward: Pass, x: Array, run: Any) -> Any:
    """Every decode step also writes one old slot of one head in one layer."""
    result = right(forward, x, run)
    values = forward.cache.v[middle(forward.config)]
    values[0, 5] = values[0, 6]
    return result


@contextlib.contextmanager
def _not_reset() -> Iterator[None]:
    """From the second prompt on, four slots near the end of the prompt keep what was there before.

    Not the first ones: a chat template fills those with the same tokens every time.
    """
    kept: list[Array] = []

    def change(right: Any, forward: Pass, ids: Any, *runs: Any) -> Any:
        result = right(forward, ids, *runs)
        values, n = forward.cache.v, len(ids)
        slots = slice(max(0, n - 12), max(1, n - 8))
        if kept and kept[0].shape == values.shape:
            values[:, :, slots] = kept[0][:, :, slots]
        kept[:] = [values.copy()]
        return result

    with prefill(change):
        yield


def _nan_at_step_three(step: int, right: Any, *arguments: Any) -> Any:
    token, logits = right(*arguments)
    if step == 3:
        logits = logits.copy()
        logits[5] = np.nan
    return token, logits


def _last_of_ties(right: Any, *arguments: Any) -> Any:
    """The two best logits are made equal, and the larger token id is taken instead of the smaller one."""
    _, logits = right(*arguments)
    logits = logits.copy()
    order = np.argsort(-logits.astype(np.float32), kind="stable")
    logits[order[1]] = logits[order[0]]
    return int(max(order[0], order[1])), logits


def _non_eos(ids: Any, config: Any) -> int:
    return sum(int(token) not in config.eos_token_ids for token in ids)


def _length_without_eos(right: Any, forward: Pass, ids: Any, *runs: Any) -> Any:
    """Logits of the position that the wrong length points at; causal, so a shorter prefill has them."""
    result = right(forward, ids, *runs)
    config = forward.config
    length = _non_eos(ids, config)
    if length in (0, len(ids)):
        return result
    other = llama_loop.KVCache.empty(config, forward.cache.k.shape[2])
    return right(replace(forward, cache=other, layer_outputs=None), ids[:length], *runs)


@contextlib.contextmanager
def _length_returned() -> Iterator[None]:
    """Only the length that prefill returns, where decoding starts, is counted wrong."""
    configs: list[Any] = []

    def remember(right: Any, forward: Pass, *rest: Any) -> Any:
        configs[:] = [forward.config]
        return right(forward, *rest)

    def counted(ids: Any) -> int:
        return _non_eos(ids, configs[0])

    with prefill(remember), mock.patch.object(production, "len", counted, create=True):
        yield


def _eos_in_prompt(model: Any) -> bool:
    settings, template, _ = tokenizer_files(model)
    end = token_text(settings, "eos_token")
    return bool(end) and (end in template or "eos_token" in template)


@contextlib.contextmanager
def _cut_silently() -> Iterator[None]:
    """A prompt longer than the largest compiled length is cut to it."""

    def bucket(right: Any, length: int, limit: int) -> Any:
        return right(min(length, limit, llama_loop.BUCKETS[-1]), limit)

    def change(right: Any, forward: Pass, ids: Any, *runs: Any) -> Any:
        return right(forward, ids[: forward.cache.k.shape[2]], *runs)

    with (
        around(llama_loop, "bucket_for", bucket),
        around(session_module, "bucket_for", bucket),
        prefill(change),
    ):
        yield


def _fault(name: str, what: str, plant: Any, entry: str = "", origin: str = CACHE, **more: Any) -> Fault:
    return fault(name, what, plant, origin, entry, **more)


FAULTS: tuple[Fault, ...] = (
    _fault("decode_slot_late", "decode K/V stored one slot late", lambda: decode(_slot_late), "E13"),
    _fault("decode_position_late", "decode rope one position late", lambda: decode(_position_late), "E13"),
    _fault("late_decode_fault", "decode goes wrong after its tenth step", lambda: steps(_late_fault), "E22"),
    _fault("open_tail", "64 empty KV slots not masked in decode", lambda: attention(_open_tail), "B7"),
    _fault("attention_hole", "decode attention reads one slot as zero", lambda: attention(_hole)),
    _fault("first_slot_hidden", "decode attention starts at slot 1", lambda: attention(_short_window)),
    _fault("query_louder", "decode attention scale 5 % too large", lambda: attention(_louder_query)),
    _fault("layer_skipped", "a middle layer passes its input on", _skip_layer),
    _fault(
        "nan_at_step_3", "one logit NaN at decode step 3",
        lambda: steps(_nan_at_step_three, of_a_prompt=False), "E19", kind="nan",
    ),
    _fault(
        "kv_layout_swapped", "prefill K/V stored token first", lambda: prefill(_swapped_layout), "E13",
        applies=lambda model: model.config().n_kv_heads > 1, where="more than one KV head",
    ),
    _fault("kv_slot_clobbered", "decode also writes an old slot", lambda: decode(_clobber), "E13"),
    _fault("cache_not_reset", "KV slots of prompt 1 in prompt 2", _not_reset, "E16", prompts=2),
    _fault(
        "last_of_ties", "of equal logits the last is chosen", lambda: decode(_last_of_ties), "E18",
        "numpy and torch document argmax as the first of equals",
    ),
    _fault(
        "prompt_length_without_eos", "prompt length counted as tokens that are not EOS",
        lambda: prefill(_length_without_eos), "E10", EXAMPLES,
        applies=_eos_in_prompt, where="a chat template that holds the EOS token",
    ),
    _fault(
        "decode_start_without_eos", "only the returned prompt length is counted as tokens that are not EOS",
        _length_returned, "E10", EXAMPLES, expected="runtime", raises="BadArgument", says="prompt length",
        applies=_eos_in_prompt, where="a chat template that holds the EOS token",
    ),
    _fault("prompt_cut", "a prompt longer than the limit silently cut", _cut_silently, "E31", EXAMPLES),
)  # fmt: skip
