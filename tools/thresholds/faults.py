"""Model-level faults, planted one at a time around a deployment on the twin.

A fault is planted before the runner is built and stays until its device work is done. All of them act through
public seams: functions of the host toolkit, weights of a session, ``npu_twin.injection``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from ml_dtypes import bfloat16

import llms.runner
import llms.session as session_module
from llms.llama_kernel_builder import host_ops, llama_loop
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.rope_table import rope_table
from llms.llama_kernel_builder.weights import ModelWeights
from npu_twin import injection
from npu_twin.listing import Launch, Listing
from npu_twin.memory import OperandView

Array = np.ndarray[Any, Any]
Plant = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True)
class ModelFault:
    """A fault: its name, what it is, where it applies, and a context manager that plants it."""

    name: str
    what: str
    plant: Callable[[ModelConfig], Plant]
    applies: Callable[[ModelConfig], bool] = lambda config: True


def _middle(config: ModelConfig) -> int:
    return config.n_layers // 2


# -- seams -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def weights(change: Callable[[ModelWeights, ModelConfig], None]) -> Iterator[None]:
    """Change the weights of every session that is built inside."""
    right: Callable[..., ModelWeights] = getattr(session_module, "pad_weights")  # noqa: B009

    def changed(loaded: ModelWeights, config: ModelConfig) -> ModelWeights:
        result = right(loaded, config)
        change(result, config)
        return result

    with mock.patch.object(session_module, "pad_weights", changed):
        yield


def table(change: Callable[[ModelConfig, int], Array]) -> Plant:
    """Build the RoPE tables of sessions otherwise."""
    return mock.patch.object(session_module, "rope_table", change)


@contextlib.contextmanager
def decode(change: Callable[..., Any]) -> Iterator[None]:
    """Replace the decode step by ``change(right, *arguments)``."""
    right = llama_loop.decode_step
    with mock.patch.object(llama_loop, "decode_step", lambda *a: change(right, *a)):
        yield


@contextlib.contextmanager
def prefill(change: Callable[..., Any]) -> Iterator[None]:
    """Replace the prefill by ``change(right, *arguments)``."""
    right = llama_loop.prefill
    with mock.patch.object(llama_loop, "prefill", lambda *a: change(right, *a)):
        yield


@contextlib.contextmanager
def attention(change: Callable[[Array, Array, Array], tuple[Array, Array, Array]]) -> Iterator[None]:
    """Change query, keys and values in front of the attention of a decode step."""
    right = host_ops.decode_attention

    def changed(profiler: Any, q: Array, keys: Array, values: Array, heads: int) -> Array:
        return right(profiler, *change(q, keys, values), heads)

    with mock.patch.object(host_ops, "decode_attention", changed):
        yield


def launches(change: Callable[[Launch], Launch]) -> Plant:
    """Change launches of every program that is loaded inside."""

    def rewrite(listing: Listing) -> Listing:
        return replace(listing, launches=tuple(change(launch) for launch in listing.launches))

    return injection.rewrite_listing(rewrite)


def _where(test: Callable[[Launch], bool], change: Callable[[Launch], Launch]) -> Plant:
    return launches(lambda launch: change(launch) if test(launch) else launch)


# -- faults ------------------------------------------------------------------------------------------------


def _theta(factor: float) -> Plant:
    return table(lambda config, n: rope_table(replace(config, rope_theta=config.rope_theta * factor), n))


def _eps(value: float) -> Plant:
    return _where(
        lambda launch: launch.op == "rms_norm",
        lambda launch: replace(launch, attrs={**launch.attrs, "eps": value}),
    )


def _tile_heads(loaded: ModelWeights, config: ModelConfig) -> None:
    """Query head h reads KV head h mod kv: the heads reordered around the right kernel."""
    heads, kv = config.n_heads, config.n_kv_heads
    d = loaded.layers[0].wq.shape[0] // heads
    order = [h for group in range(kv) for h in range(heads) if h % kv == group]
    columns = np.concatenate([np.arange(h * d, (h + 1) * d) for h in order])
    for layer in loaded.layers:
        layer.wq = np.ascontiguousarray(layer.wq[columns])
        layer.wo = np.ascontiguousarray(layer.wo[:, columns])
        if layer.bq is not None:
            layer.bq = np.ascontiguousarray(layer.bq[columns])


def _norms_plus_one(loaded: ModelWeights, config: ModelConfig) -> None:
    for layer in loaded.layers:
        for name in ("attn_norm", "ffn_norm"):
            setattr(layer, name, (getattr(layer, name).astype(np.float32) + 1).astype(bfloat16))


def _swap_gate_up(loaded: ModelWeights, config: ModelConfig) -> None:
    layer = loaded.layers[_middle(config)]
    layer.w_gate, layer.w_up = layer.w_up, layer.w_gate


def _neighbour_weight(loaded: ModelWeights, config: ModelConfig) -> None:
    loaded.layers[_middle(config)].wk = loaded.layers[_middle(config) - 1].wk


def _no_bias(loaded: ModelWeights, config: ModelConfig) -> None:
    for layer in loaded.layers:
        layer.bq, layer.bk, layer.bv = (np.zeros_like(one) for one in (layer.bq, layer.bk, layer.bv))


def _scaled_final_norm(loaded: ModelWeights, config: ModelConfig) -> None:
    loaded.final_norm = (loaded.final_norm.astype(np.float32) * 1.05).astype(bfloat16)


@contextlib.contextmanager
def _skip_layer() -> Iterator[None]:
    def sequence_without(sequence: Any, config: ModelConfig) -> Any:
        skipped = _middle(config)

        def prefill_layer(run: Any, tail: str, layer: int, x: Array) -> Any:
            out, k, v = sequence.prefill_layer(run, tail, layer, x)
            return (x, k, v) if layer == skipped else (out, k, v)

        def decode_layer(run: Any, layer: int, x: Array, *rest: Any) -> Any:
            out = sequence.decode_layer(run, layer, x, *rest)
            return x if layer == skipped else out

        return replace(sequence, prefill_layer=prefill_layer, decode_layer=decode_layer)

    def in_prefill(right: Any, run: Any, other: Any, sequence: Any, w: Any, config: Any, *rest: Any) -> Any:
        return right(run, other, sequence_without(sequence, config), w, config, *rest)

    def in_decode(right: Any, run: Any, sequence: Any, w: Any, config: Any, *rest: Any) -> Any:
        return right(run, sequence_without(sequence, config), w, config, *rest)

    with prefill(in_prefill), decode(in_decode):
        yield


def _slot_late(
    right: Any, run: Any, seq: Any, w: Any, cfg: Any, x: Any, lut: Array, cache: Any, pos: int, *rest: Any
) -> Any:
    """Written one slot late, at the right angle; the hole is attended to."""
    if pos + 1 >= cache.k.shape[2]:
        return right(run, seq, w, cfg, x, lut, cache, pos, *rest)
    return right(run, seq, w, cfg, x, np.roll(lut, 1, axis=0), cache, pos + 1, *rest)


def _position_late(right: Any, run: Any, seq: Any, w: Any, cfg: Any, x: Any, lut: Array, *rest: Any) -> Any:
    return right(run, seq, w, cfg, x, np.roll(lut, -1, axis=0), *rest)


def _open_tail(q: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    """Attend to 64 slots behind the position as well, as far as the cache goes."""
    room = keys.strides[0] // keys.strides[1]
    shape = (keys.shape[0], min(room, keys.shape[1] + 64), keys.shape[2])
    wide = [np.lib.stride_tricks.as_strided(x, shape, x.strides) for x in (keys, values)]
    return q, wide[0], wide[1]


def _hole(q: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    """One slot of the prompt reads as zero, the cache itself is right."""
    keys, values = keys.copy(), values.copy()
    keys[:, 20], values[:, 20] = 0, 0
    return q, keys, values


def _short_window(q: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    """The first slot is out of sight."""
    return q, keys[:, 1:], values[:, 1:]


def _louder_query(q: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    return (q.astype(np.float32) * 1.05).astype(bfloat16), keys, values


def _swapped_layout(right: Any, *arguments: Any) -> Any:
    """K and V stored as [token, head] where [head, token] is read."""
    result = right(*arguments)
    ids, cache = arguments[5], arguments[6]
    n = len(ids)
    for array in (cache.k, cache.v):
        layers, kv, _, d = array.shape
        tokens_first = np.ascontiguousarray(array[:, :, :n].transpose(0, 2, 1, 3))
        array[:, :, :n] = tokens_first.reshape(layers, kv, n, d)
    return result


def _clobber(right: Any, *arguments: Any) -> Any:
    """Every decode step also writes one old slot of one head in one layer."""
    result = right(*arguments)
    cache = arguments[6]
    cache.v[_middle(arguments[3]), 0, 5] = cache.v[_middle(arguments[3]), 0, 6]
    return result


@contextlib.contextmanager
def _nan_at_step_three() -> Iterator[None]:
    steps: list[int] = []

    def poisoned(right: Any, *arguments: Any) -> Any:
        token, logits = right(*arguments)
        steps.append(1)
        if len(steps) == 3:
            logits = logits.copy()
            logits[5] = np.nan
        return token, logits

    with decode(poisoned):
        yield


@contextlib.contextmanager
def rare_tile(rate: float = 5e-4, seed: int = 0, width: int = 64) -> Iterator[list[str]]:
    """A tile of a layer's output reads zero, once in 1/rate layer calls; yields the list of events."""
    generator = np.random.default_rng(seed)
    events: list[str] = []

    def corrupt(launch: Launch, views: Mapping[str, OperandView]) -> None:
        if launch.name != "ffn_add" or generator.random() >= rate:
            return
        out = views["out"].u16.reshape(-1)
        start = int(generator.integers(out.size // width)) * width
        out[start : start + width] = 0
        events.append(launch.name)

    with injection.corrupt_launch(corrupt):
        yield events


def _rare_tile(config: ModelConfig) -> Plant:
    """A seed that strikes in the decode steps of one prompt: few layers make few layer calls."""
    calls = range(config.n_layers, config.n_layers * 32)
    for seed in range(10_000):
        draws = np.random.default_rng(seed).random(calls.stop)
        if (draws[calls.start :] < 5e-4).any() and not (draws[: calls.start] < 5e-4).any():
            return rare_tile(seed=seed)
    raise ValueError("no seed found")


def _views() -> Plant:
    """What a runner records when it keeps views of one reused buffer: every layer shows the last one's."""
    right = llms.runner._named
    return mock.patch.object(
        llms.runner, "_named", lambda layers: right([layers[-1]] * len(layers)) if layers else right(layers)
    )


def _is(op: str, **dims: int) -> Callable[[Launch], bool]:
    return lambda launch: launch.op == op and all(launch.dims[name] == value for name, value in dims.items())


FAULTS: tuple[ModelFault, ...] = (
    ModelFault("rope_theta_tenth", "rope base 10x too small", lambda _: _theta(0.1)),
    ModelFault("rope_theta_hundredfold", "rope base 100x too large", lambda _: _theta(100.0)),
    ModelFault(
        "rope_interleaved",
        "rope turns neighbours instead of halves",
        lambda _: _where(_is("rope"), lambda launch: replace(launch, method="interleaved")),
    ),
    ModelFault(
        "rope_one_late",
        "all positions one late, prompt and decode alike",
        lambda _: table(lambda config, n: np.roll(rope_table(config, n), -1, axis=0)),
    ),
    ModelFault(
        "gqa_tiled",
        "query head h reads KV head h mod kv_heads",
        lambda _: weights(_tile_heads),
        lambda config: 1 < config.n_kv_heads < config.n_heads,
    ),
    ModelFault("decode_slot_late", "decode K/V stored one slot late", lambda _: decode(_slot_late)),
    ModelFault("decode_position_late", "decode rope one position late", lambda _: decode(_position_late)),
    ModelFault("open_tail", "64 empty KV slots not masked in decode", lambda _: attention(_open_tail)),
    ModelFault("attention_hole", "decode attention reads one slot as zero", lambda _: attention(_hole)),
    ModelFault("first_slot_hidden", "decode attention starts at slot 1", lambda _: attention(_short_window)),
    ModelFault("query_louder", "decode attention scale 5 % too large", lambda _: attention(_louder_query)),
    ModelFault(
        "no_causal_mask",
        "prefill attention without its mask",
        lambda _: _where(
            _is("flash_attention"),
            lambda launch: replace(launch, attrs={**launch.attrs, "causal": False}),
        ),
    ),
    ModelFault("norm_plus_one", "1 added to the norm weights", lambda _: weights(_norms_plus_one)),
    ModelFault("layer_skipped", "a middle layer passes its input on", lambda _: _skip_layer()),
    ModelFault("gate_up_swapped", "gate and up swapped in a middle layer", lambda _: weights(_swap_gate_up)),
    ModelFault("neighbour_weight", "K weight of the layer before", lambda _: weights(_neighbour_weight)),
    ModelFault("final_norm_5_percent", "final norm 5 % too large", lambda _: weights(_scaled_final_norm)),
    ModelFault(
        "bias_dropped", "QKV bias dropped", lambda _: weights(_no_bias), lambda config: config.qkv_bias
    ),
    ModelFault("nan_at_step_3", "one logit NaN at decode step 3", lambda _: _nan_at_step_three()),
    ModelFault("rare_bad_tile", "a tile of a layer's output zero, 5e-4 per layer call", _rare_tile),
    ModelFault(
        "decode_norm_bf16_sum",
        "one-row norm with a bf16 sum of squares",
        lambda _: _where(_is("rms_norm", M=1), lambda launch: replace(launch, method="weighted_bf16_sum")),
    ),
    ModelFault(
        "eps_1e-5_for_1e-6", "norm eps 1e-5 for 1e-6", lambda _: _eps(1e-5), lambda c: c.rms_eps == 1e-6
    ),
    ModelFault(
        "eps_1e-6_for_1e-5", "norm eps 1e-6 for 1e-5", lambda _: _eps(1e-6), lambda c: c.rms_eps == 1e-5
    ),
    ModelFault("results_are_views", "records are views of one reused buffer", lambda _: _views()),
    ModelFault(
        "kv_layout_swapped",
        "prefill K/V stored token first",
        lambda _: prefill(_swapped_layout),
        lambda config: config.n_kv_heads > 1,
    ),
    ModelFault("kv_slot_clobbered", "decode also writes an old slot", lambda _: decode(_clobber)),
    ModelFault(
        "down_low_precision",
        "down projection of the prompt in the low-precision tier",
        lambda _: _where(
            lambda launch: launch.name == "down_gemm", lambda launch: replace(launch, method="direct")
        ),
    ),
)
"""All faults, in the order of the report."""


def fault(name: str) -> ModelFault:
    """Return one fault; raises KeyError naming the known ones."""
    for one in FAULTS:
        if one.name == name:
            return one
    raise KeyError(f"no fault {name!r}; known: {', '.join(one.name for one in FAULTS)}")
