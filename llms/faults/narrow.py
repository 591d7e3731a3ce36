"""Narrow faults of weights and kernels: one head, tile, row or element; the rest is right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

from llms.faults.seams import PORTING, Array, around, fault, middle, weights
from llms.llama_kernel_builder import host_ops, llama_loop
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.weights import ModelWeights
from npu_twin.faults._types import Fault, Plant
from npu_twin.faults.device import after, is_op, where
from npu_twin.listing import Launch
from npu_twin.memory import OperandView

_MEMORY = "a table that was written, cut or padded at the wrong place"
_KERNEL = "kernel of another version, precision or tile"


def rounded(array: Array, dtype: Any = bfloat16) -> Array:
    """Round to ``dtype``; the result is bf16."""
    return np.asarray(array).astype(np.float32).astype(dtype).astype(np.float32).astype(bfloat16)


def fp8(array: Array) -> Array:
    """Values as eight bits hold them, in bf16."""
    return rounded(array, float8_e4m3fn)


def _own(weights: Any, name: str) -> Array:
    """An array of a layer or model, copied so that it can be changed."""
    array: Array = getattr(weights, name).copy()
    setattr(weights, name, array)
    return array


# -- weights -----------------------------------------------------------------------------------------------


def _key_of_a_head(loaded: ModelWeights, config: ModelConfig) -> None:
    keys = _own(loaded.layers[-1], "wk")
    keys[-(len(keys) // config.n_kv_heads) :] = 0


def _norm_of_next(loaded: ModelWeights, config: ModelConfig) -> None:
    index = middle(config) - 1
    loaded.layers[index].ffn_norm = loaded.layers[index + 1].ffn_norm


def _layers_swapped(loaded: ModelWeights, config: ModelConfig) -> None:
    index = middle(config)
    loaded.layers[index - 1], loaded.layers[index] = loaded.layers[index], loaded.layers[index - 1]


def _tile_in_eight_bits(loaded: ModelWeights, config: ModelConfig) -> None:
    tile = _own(loaded.layers[middle(config)], "w_up")[64:128, 64:128]
    tile[...] = fp8(tile)


def _tile_lost(loaded: ModelWeights, config: ModelConfig) -> None:
    _own(loaded.layers[middle(config)], "w_down")[8:16, 8:16] = 0


def _row_negated(loaded: ModelWeights, config: ModelConfig) -> None:
    row = _own(loaded.layers[middle(config)], "wv")[5]
    row[...] = rounded(-row.astype(np.float32))


def _projection_in_eight_bits(loaded: ModelWeights, config: ModelConfig) -> None:
    layer = loaded.layers[middle(config)]
    layer.wq, layer.wk = fp8(layer.wq), fp8(layer.wk)


def _depth_cut(loaded: ModelWeights, config: ModelConfig) -> None:
    for layer in loaded.layers:
        _own(layer, "w_down")[:, config.hidden_dim - 32 :] = 0


def _bias_of_a_head(loaded: ModelWeights, config: ModelConfig) -> None:
    bias = _own(loaded.layers[middle(config)], "bq")
    size = len(bias) // config.n_heads
    bias[size : 2 * size] = 0


def _qk_norms_swapped(loaded: ModelWeights, config: ModelConfig) -> None:
    for layer in loaded.layers:
        layer.q_norm, layer.k_norm = layer.k_norm, layer.q_norm


def _head_shifted(loaded: ModelWeights, config: ModelConfig) -> None:
    last = slice(config.vocab_size - config.vocab_size // 8, config.vocab_size)
    rows = _own(loaded, "lm_head")[last]
    rows[...] = np.roll(rows, 1, axis=0)


def _head_in_eight_bits(loaded: ModelWeights, config: ModelConfig) -> None:
    loaded.lm_head = fp8(loaded.lm_head)


def _embedding_end(loaded: ModelWeights, config: ModelConfig) -> None:
    rows = _own(loaded, "embedding")[config.vocab_size - 32 : config.vocab_size]
    rows[16:] = rows[:16]


def _fifteen_bits(right: Any, profiler: Any, table: Array, ids: Array) -> Any:
    """Token ids lose their highest bit on the way to the embedding."""
    top = 1 << ((len(table) - 1).bit_length() - 1)
    return right(profiler, table, np.where(ids >= top, ids - top, ids))


# -- logits ------------------------------------------------------------------------------------------------


def _logits(change: Callable[[Array, ModelConfig], Array]) -> Plant:
    def head(right: Any, run: Any, loaded: ModelWeights, config: ModelConfig, row: Array) -> Array:
        values = host_ops.widen(right(run, loaded, config, row))
        return change(values, config).astype(bfloat16)

    return around(llama_loop, "head", head)


def _rare_lost(logits: Array, config: ModelConfig) -> Array:
    logits = logits.copy()
    logits[-20:] = logits.min()
    return logits


def _never_ends(logits: Array, config: ModelConfig) -> Array:
    logits = logits.copy()
    logits[list(config.eos_token_ids)] = logits.min()
    return logits


# -- kernels -----------------------------------------------------------------------------------------------


def _values(view: OperandView) -> Array:
    return (view.u16.astype(np.uint32) << 16).view(np.float32)


def _set(view: OperandView, values: Array) -> None:
    view.u16[...] = np.asarray(values, np.float32).astype(bfloat16).view(np.uint16).reshape(view.shape)


def _times(name: str, factor: float) -> Plant:
    def corrupt(launch: Launch, views: Mapping[str, OperandView]) -> None:
        _set(views["out"], _values(views["out"]) * np.float32(factor))

    return after(lambda launch: launch.name == name, corrupt)


def _gelu(launch: Launch, views: Mapping[str, OperandView]) -> None:
    gate, up = (_values(view) for name, view in views.items() if name != "out")
    _set(views["out"], gate / (1 + np.exp(-1.702 * gate)) * up)


@contextlib.contextmanager
def _block_stale_once() -> Iterator[None]:
    """The first 16 rows of one GEMV, once: what ten runs before left there."""
    runs, kept = 0, np.empty(0, np.uint16)

    def corrupt(launch: Launch, views: Mapping[str, OperandView]) -> None:
        nonlocal runs, kept
        runs += 1
        rows = views["out"].array.reshape(-1)[:16]
        if runs == 40:
            kept = rows.copy()
        if runs == 50:
            rows[...] = kept

    with after(lambda launch: launch.name == "up_gemv", corrupt):
        yield


@contextlib.contextmanager
def _unsteady() -> Iterator[None]:
    """The last bit of one element of a GEMV is not the same from run to run."""
    generator = np.random.default_rng()

    def corrupt(launch: Launch, views: Mapping[str, OperandView]) -> None:
        values = views["out"].u16.reshape(-1)
        values[int(generator.integers(values.size))] ^= 1

    with after(lambda launch: launch.name == "down_gemv", corrupt):
        yield


def _low(name: str) -> Plant:
    return where(lambda launch: launch.name == name, lambda launch: replace(launch, method="direct"))


def _changed(name: str, what: str, change: Any, origin: str = _MEMORY, **more: Any) -> Fault:
    return fault(name, what, lambda: weights(change), origin, **more)


FAULTS: tuple[Fault, ...] = (
    _changed("head_key_zeroed", "K of one KV head zero in the last layer", _key_of_a_head),
    _changed("norm_of_next_layer", "one layer uses the FFN norm of the next", _norm_of_next, PORTING),
    _changed("layers_swapped", "two layers change places", _layers_swapped, PORTING),
    _changed("weight_tile_fp8", "one tile of 64 x 64 weights in eight bits", _tile_in_eight_bits),
    _changed("weight_tile_lost", "8 x 8 weights of one layer zero", _tile_lost),
    _changed("value_row_negated", "one row of a V projection with the other sign", _row_negated),
    _changed("projection_fp8", "Q and K of one layer in eight bits", _projection_in_eight_bits, _KERNEL),
    _changed("down_depth_cut", "the last 32 of K missing in every down projection", _depth_cut, _KERNEL),
    _changed(
        "bias_head_dropped", "Q bias of one head missing in one layer", _bias_of_a_head,
        applies=lambda model: model.config().qkv_bias, where="QKV bias",
    ),
    _changed(
        "qk_norms_swapped", "norm weights of Q and K change places", _qk_norms_swapped, PORTING,
        applies=lambda model: model.config().qk_norm, where="QK norm",
    ),
    _changed("head_rows_shifted", "the last eighth of the LM head one row off", _head_shifted),
    _changed("head_fp8", "LM head in eight bits", _head_in_eight_bits, _KERNEL),
    _changed("embedding_end_wrong", "the last 16 embedding rows are others", _embedding_end),
    fault(
        "token_high_bit_lost", "token ids lose their highest bit",
        lambda: around(host_ops, "embed", _fifteen_bits), _MEMORY,
    ),
    fault(
        "rare_logits_lost", "logits of the last 20 tokens lowest of all", lambda: _logits(_rare_lost), _MEMORY
    ),
    fault("never_ends", "the end token's logit lowest of all", lambda: _logits(_never_ends)),
    fault(
        "logits_capped", "logits soft-capped at 30", lambda: _logits(lambda x, _: 30 * np.tanh(x / 30)),
        "Gemma 2's soft cap of the final logits",
    ),
    fault("logits_one_percent", "logits 1 % too large", lambda: _logits(lambda x, _: x * np.float32(1.01))),
    fault(
        "final_norm_eps", "final norm with an eps of 0.1",
        lambda: around(host_ops, "final_rms_norm", lambda right, p, row, w, eps: right(p, row, w, 0.1)),
    ),
    fault("query_louder_prefill", "Q of a prompt 2 % too large", lambda: _times("rope_q", 1.02), _KERNEL),
    fault(
        "residual_one_percent", "first residual sum of a layer 1 % too large",
        lambda: _times("res_add", 1.01), _KERNEL,
    ),
    fault(
        "gelu_for_silu", "GELU's approximation instead of SiLU", lambda: after(is_op("silu_mul"), _gelu),
        expected="phase1", ops=("silu_mul",),
    ),
    fault("gemv_block_stale_once", "16 rows of one GEMV stale, once", _block_stale_once, _KERNEL),
    fault("last_bit_unsteady", "last bits differ from run to run", _unsteady, _KERNEL),
    fault(
        "query_low_precision", "Q projection of a prompt in the low-precision tier", lambda: _low("q_gemm"),
        _KERNEL,
    ),
    fault(
        "output_low_precision", "O projection of a prompt in the low-precision tier", lambda: _low("o_gemm"),
        _KERNEL,
    ),
)  # fmt: skip
