"""Narrow faults of the loop: one layer, step, slot, length or call; the rest is right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from ml_dtypes import bfloat16

from llms.faults.narrow import fp8, rounded
from llms.faults.seams import (
    CACHE,
    Array,
    around,
    attention,
    decode,
    fault,
    layers,
    middle,
    prefill,
    steps,
)
from llms.llama_kernel_builder import host_ops, llama_loop
from llms.llama_kernel_builder.layer import LayerRun
from llms.llama_kernel_builder.llama_loop import Pass
from llms.llama_kernel_builder.model_config import ModelConfig
from npu_twin.faults._types import Fault, Plant

_LENGTH = "a mistake that begins at a length"
_STATE = "state that one call leaves to a later one"

# -- layers ------------------------------------------------------------------------------------------------


def _of_middle(change: Callable[..., Any]) -> Plant:
    """Change decode of the layer in the middle: ``change(right, config, run, x)``."""

    def in_decode(right: Any, forward: Pass, run: LayerRun, x: Array) -> Any:
        if run.index != middle(forward.config):
            return right(run, x)
        return change(right, forward.config, run, x)

    return layers(in_decode=in_decode)


def _residual_twice(right: Any, config: ModelConfig, run: LayerRun, x: Array) -> Array:
    out = np.asarray(right(run, x))
    return rounded(out.astype(np.float32) + np.asarray(x).astype(np.float32))


def _with_attention(change: Callable[..., Any]) -> Callable[..., Any]:
    """Change what the layer's attention is given or returns: ``change(attend, config, q, k, v)``."""

    def layer_with(right: Any, config: ModelConfig, run: LayerRun, x: Array) -> Any:
        attend = run.attend
        run.attend = lambda q, k, v: change(attend, config, q, k, v)
        return right(run, x)

    return layer_with


def _values_reversed(attend: Any, config: ModelConfig, q: Array, k: Array, v: Array) -> Array:
    heads = np.asarray(v).reshape(config.n_kv_heads, -1)[::-1]
    found: Array = attend(q, k, heads.reshape(np.asarray(v).shape).copy())
    return found


def _heads_shifted(attend: Any, config: ModelConfig, q: Array, k: Array, v: Array) -> Array:
    out = np.asarray(attend(q, k, v))
    return np.roll(out.reshape(config.n_heads, -1), 1, axis=0).reshape(out.shape)


@contextlib.contextmanager
def _stale_hidden() -> Iterator[None]:
    """From the 17th decode step on, the layer in the middle is given the hidden state of the step before."""
    stale, before = False, np.empty(0)

    def count(step: int, right: Any, *arguments: Any) -> Any:
        nonlocal stale
        stale = step > 16
        return right(*arguments)

    def layer(right: Any, config: ModelConfig, run: LayerRun, x: Array) -> Any:
        nonlocal before
        given, before = before if stale else x, np.array(x)
        return right(run, given)

    with steps(count), _of_middle(layer):
        yield


# -- cache and positions -----------------------------------------------------------------------------------


def _slot_lost(step: int, right: Any, forward: Pass, x: Array, run: Any) -> Any:
    """What the 12th decode step wrote for one head is gone after it."""
    result = right(forward, x, run)
    if step == 12:
        forward.cache.k[middle(forward.config), 0, forward.position] = 0
    return result


def _key_into_neighbour(right: Any, forward: Pass, x: Array, run: Any) -> Any:
    result = right(forward, x, run)
    index, keys, position = middle(forward.config), forward.cache.k, forward.position
    keys[index - 1, :, position] = keys[index, :, position]
    return result


def _cache_in_eight_bits(right: Any, forward: Pass, x: Array, run: Any) -> Any:
    result = right(forward, x, run)
    for array in (forward.cache.k, forward.cache.v):
        array[:, :, forward.position] = fp8(array[:, :, forward.position])
    return result


def _table(change: Callable[[Array, int], Array]) -> Plant:
    """Decode with ``change(table, position)``."""

    def step(right: Any, forward: Pass, x: Array, run: Any) -> Any:
        table = change(forward.rope_lut, forward.position)
        return right(replace(forward, rope_lut=table), x, run)

    return decode(step)


def _wrapped(table: Array, position: int) -> Array:
    return np.concatenate([table[:64]] * (len(table) // 64)) if position >= 64 else table


def _late_beyond(table: Array, position: int) -> Array:
    return np.roll(table, -1, axis=0) if position >= 128 else table


def _prefill_table(shortest: int, first: int) -> Plant:
    """Rotary rows of a prompt one late from ``first`` on, in compiled lengths from ``shortest``."""

    def pad(right: Any, rows: Array, width: int) -> Array:
        out: Array = right(rows, width)
        if len(out) < shortest:
            return out
        out = out.copy()
        out[first:] = np.roll(out[first:], -1, axis=0)
        return out

    return around(llama_loop, "pad_table", pad)


def _without_self(q: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    return (q, keys[:, :-1], values[:, :-1]) if keys.shape[1] > 1 else (q, keys, values)


def _one_hole(q: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    """At 60 positions the slot that the first KV head's queries look at most reads zero."""
    if keys.shape[1] == 60:
        keys, values = keys.copy(), values.copy()
        query = host_ops.widen(q).reshape(keys.shape[0], -1, keys.shape[2])[0]
        slot = int((query @ host_ops.widen(keys[0]).T).max(axis=0)[:-1].argmax())
        keys[0, slot], values[0, slot] = 0, 0
    return q, keys, values


def _softmax(change: Callable[[Array], Array]) -> Plant:
    """Decode attention with ``change(scores)`` for its probabilities."""

    def attend(profiler: Any, q: Array, keys: Array, values: Array, n_heads: int) -> Array:
        kv_heads, _, d = keys.shape
        query = host_ops.widen(q).reshape(kv_heads, n_heads // kv_heads, d)
        wide_keys, wide_values = (host_ops.widen(np.ascontiguousarray(x)) for x in (keys, values))
        scores = query @ wide_keys.transpose(0, 2, 1) * np.float32(d**-0.5)
        out: Array = (change(scores) @ wide_values).reshape(n_heads * d).astype(bfloat16)
        return out

    return mock.patch.object(host_ops, "decode_attention", attend)


def _saturated(scores: Array) -> Array:
    weights = np.exp(np.minimum(scores, np.float32(4.0)))
    probabilities: Array = weights / weights.sum(-1, keepdims=True)
    return probabilities


def _probabilities_bf16(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return rounded(weights / weights.sum(-1, keepdims=True)).astype(np.float32)


# -- prompts and calls -------------------------------------------------------------------------------------


def _with_ids(change: Callable[[list[int]], list[int]]) -> Plant:
    return prefill(
        lambda right, forward, ids, *runs: right(forward, change([int(token) for token in ids]), *runs)
    )


def _short(ids: list[int]) -> list[int]:
    return [ids[0] ^ 1, *ids[1:]] if len(ids) < 8 else ids


def _odd(ids: list[int]) -> list[int]:
    return [*ids[:-2], ids[-1], ids[-1]] if len(ids) % 2 and len(ids) > 1 else ids


def _last_slot_of_full(right: Any, forward: Pass, ids: Any, *runs: Any) -> Any:
    result = right(forward, ids, *runs)
    if len(ids) in llama_loop.BUCKETS:
        forward.cache.k[:, :, len(ids) - 1] = 0
    return result


def _token_of_before() -> Plant:
    """One token near the end of a prompt is that of the prompt before."""
    kept: list[int] = []

    def change(ids: list[int]) -> list[int]:
        place = max(0, len(ids) - 10)
        used = [*ids[:place], kept[0], *ids[place + 1 :]] if kept else ids
        kept[:] = [ids[place]]
        return used

    return _with_ids(change)


@contextlib.contextmanager
def _first_logits_again() -> Iterator[None]:
    """The first decode step returns what the prefill returned."""
    kept: list[Any] = []

    def start(right: Any, *arguments: Any) -> Any:
        kept[:] = [right(*arguments)]
        return kept[0]

    def step(right: Any, *arguments: Any) -> Any:
        result = right(*arguments)
        return kept.pop() if kept else result

    with prefill(start), decode(step):
        yield


def _worn_out(step: int, right: Any, *arguments: Any) -> Any:
    """Right for 40 decode steps, 1 % too large in the logits from then on, whatever the prompt."""
    token, logits = right(*arguments)
    return token, rounded(host_ops.widen(logits) * np.float32(1.01)) if step > 40 else logits


FAULTS: tuple[Fault, ...] = (
    fault(
        "residual_twice", "residual added twice in one layer, in decode", lambda: _of_middle(_residual_twice)
    ),
    fault("stale_hidden", "one layer is given the step before, from step 17 on", _stale_hidden, _STATE),
    fault(
        "value_heads_reversed", "V heads stored in the other order, one layer, in decode",
        lambda: _of_middle(_with_attention(_values_reversed)), CACHE,
        applies=lambda model: model.config().n_kv_heads > 1, where="more than one KV head",
    ),
    fault(
        "heads_shifted", "attention results one head on, one layer, in decode",
        lambda: _of_middle(_with_attention(_heads_shifted)),
    ),
    fault("slot_lost", "what one step wrote for one head is lost", lambda: steps(_slot_lost), CACHE),
    fault(
        "key_into_neighbour", "K of one layer also lands in the layer before",
        lambda: decode(_key_into_neighbour), CACHE,
    ),
    fault("cache_fp8", "decode stores K and V in eight bits", lambda: decode(_cache_in_eight_bits), CACHE),
    fault("position_wraps", "positions start again at 64, in decode", lambda: _table(_wrapped), _LENGTH),
    fault(
        "rows_late_from_32", "rotary rows of a prompt one late from the 32nd on",
        lambda: _prefill_table(0, 32), _LENGTH,
    ),
    fault("own_slot_hidden", "decode attention leaves out the new slot", lambda: attention(_without_self)),
    fault(
        "window_48", "decode attends to the last 48 slots only",
        lambda: attention(lambda q, k, v: (q, k[:, -48:], v[:, -48:])), _LENGTH,
    ),
    fault(
        "hole_at_one_step", "the slot that counts most reads zero for one head at one step",
        lambda: attention(_one_hole), CACHE,
    ),
    fault(
        "softmax_saturates", "soft-max without its maximum: scores saturate", lambda: _softmax(_saturated)
    ),
    fault(
        "probabilities_bf16", "decode attention rounds its probabilities to bf16",
        lambda: _softmax(_probabilities_bf16),
    ),
    fault(
        "first_logits_again", "the first decode step returns the prefill's logits", _first_logits_again,
        _STATE,
    ),
    fault(
        "short_prompt", "the first token of a prompt below 8 tokens is another", lambda: _with_ids(_short),
        _LENGTH,
    ),
    fault(
        "odd_prompt", "the last token but one repeats the last in prompts of odd length",
        lambda: _with_ids(_odd), _LENGTH,
    ),
    fault(
        "full_length_slot", "a prompt that fills its compiled length loses its last slot",
        lambda: prefill(_last_slot_of_full), _LENGTH,
    ),
    fault(
        "token_of_before", "one token of a prompt is that of the prompt before", _token_of_before, _STATE,
        prompts=2,
    ),
    fault(
        "worn_out", "logits 1 % too large after 40 decode steps",
        lambda: steps(_worn_out, of_a_prompt=False), _STATE,
    ),
    fault(
        "late_beyond_128", "decode one position late from 128 on", lambda: _table(_late_beyond), _LENGTH,
        expected="phase6",
    ),
    fault(
        "long_table_late", "rotary rows one late in compiled lengths above 128",
        lambda: _prefill_table(256, 0), _LENGTH, expected="phase6",
    ),
)  # fmt: skip
