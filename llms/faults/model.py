"""Faults of weights, configuration and position: what the model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

import llms.llama_kernel_builder.deployment.session as session_module
from llms.faults.seams import (
    EXAMPLES,
    Array,
    around,
    configuration,
    fault,
    loading,
    middle,
    table,
    weights,
)
from llms.llama_kernel_builder.model_config import ModelConfig, RopeScaling
from llms.llama_kernel_builder.rope_table import rope_table
from llms.llama_kernel_builder.weights import ModelWeights
from npu_twin.faults._types import Fault, Plant
from npu_twin.faults.device import is_op, where, with_attrs


def grouped(model: Any) -> bool:
    """Whether KV heads are shared, and more than one."""
    config = model.config()
    return bool(1 < config.n_kv_heads < config.n_heads)


def _biased(model: Any) -> bool:
    return bool(model.config().qkv_bias)


def _theta(factor: float) -> Plant:
    return table(lambda config, n: rope_table(replace(config, rope_theta=config.rope_theta * factor), n))


def _unscaled(config: ModelConfig, n: int) -> Array:
    return rope_table(replace(config, rope_scaling=RopeScaling()), n)


def _eps(value: float) -> Plant:
    return where(is_op("rms_norm"), with_attrs(eps=value))


def tile_heads(loaded: ModelWeights, config: ModelConfig) -> None:
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


def _scaled(array: Array, factor: float) -> Array:
    return (array.astype(np.float32) * np.float32(factor)).astype(bfloat16)


def _norms_plus_one(loaded: ModelWeights, config: ModelConfig) -> None:
    for layer in loaded.layers:
        for name in ("attn_norm", "ffn_norm"):
            setattr(layer, name, (getattr(layer, name).astype(np.float32) + 1).astype(bfloat16))


def _swap_gate_up(loaded: ModelWeights, config: ModelConfig) -> None:
    layer = loaded.layers[middle(config)]
    layer.w_gate, layer.w_up = layer.w_up, layer.w_gate


def _neighbour_weight(loaded: ModelWeights, config: ModelConfig) -> None:
    loaded.layers[middle(config)].wk = loaded.layers[middle(config) - 1].wk


def _older_weights(loaded: ModelWeights, config: ModelConfig) -> None:
    layer = loaded.layers[middle(config)]
    layer.w_up = _scaled(layer.w_up, 0.97)


def _bias_times(factor: float, *names: str) -> Any:
    def change(loaded: ModelWeights, config: ModelConfig) -> None:
        for layer in loaded.layers:
            for name in names:
                setattr(layer, name, _scaled(getattr(layer, name), factor))

    return change


def _scaled_final_norm(loaded: ModelWeights, config: ModelConfig) -> None:
    loaded.final_norm = _scaled(loaded.final_norm, 1.05)


def _as_tied(right: Any, tensors: Mapping[str, Array], config: ModelConfig) -> ModelWeights:
    return right(tensors, replace(config, tied_embeddings=True))  # type: ignore[no-any-return]


def _quantised_again(right: Any, tensors: Mapping[str, Array], config: ModelConfig) -> ModelWeights:
    """Every projection through symmetric 4-bit blocks of 32, as if it were not in its final form yet."""
    loaded: ModelWeights = right(tensors, config)
    for layer in loaded.layers:
        for name in ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"):
            values = getattr(layer, name).astype(np.float32)
            blocks = values.reshape(-1, 32)
            scale = np.maximum(np.abs(blocks).max(axis=1, keepdims=True) / 7, 1e-12)
            setattr(layer, name, (np.round(blocks / scale) * scale).reshape(values.shape).astype(bfloat16))
    return loaded


class _Renamed(Mapping[str, Array]):
    """Tensors of a checkpoint of which one has another name."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors
        self._hidden = "model.layers.1.mlp.up_proj.weight"

    def __getitem__(self, name: str) -> Array:
        if name == self._hidden:
            raise KeyError(name)
        tensor: Array = self._tensors[name]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if name != self._hidden)

    def __len__(self) -> int:
        return len(self._tensors) - 1

    def ledger(self) -> Any:
        """What was read so far."""
        return self._tensors.ledger()


def _llama3(model: Any) -> bool:
    return bool(model.config().rope_scaling.kind == "llama3")


FAULTS: tuple[Fault, ...] = (
    fault(
        "tensor_renamed", "a weight has another name in the checkpoint",
        lambda: around(session_module, "load_tensors", lambda right, checkpoint: _Renamed(right(checkpoint))),
        entry="E1", kind="runtime", expected="phase0", raises="ConfigError", says="lacks tensor",
    ),
    fault(
        "head_as_tied", "an LM head of its own is left out, the embedding used instead",
        lambda: loading(_as_tied), EXAMPLES, "E3", expected="phase0",
        applies=lambda model: not model.config().tied_embeddings, where="an LM head of its own",
    ),
    fault(
        "rope_theta_tenth", "rope base 10x too small", lambda: _theta(0.1), entry="E4", expected="phase0"
    ),
    fault(
        "rope_theta_hundredfold", "rope base 100x too large", lambda: _theta(100.0), entry="E4",
        expected="phase0",
    ),
    fault(
        "rope_one_late", "all positions one late, prompt and decode alike",
        lambda: table(lambda config, n: np.roll(rope_table(config, n), -1, axis=0)), entry="E4",
        expected="phase0",
    ),
    fault(
        "llama3_scaling_ignored", "frequencies without the llama3 scaling", lambda: table(_unscaled),
        EXAMPLES + "/llama32_1b", "E4", expected="phase0", applies=_llama3, where="rope scaling llama3",
    ),
    fault(
        "scaling_not_read", "the configuration is read without rope scaling",
        lambda: configuration(lambda config: replace(config, rope_scaling=RopeScaling())),
        EXAMPLES + "/llama32_1b", "E4", expected="phase0", applies=_llama3, where="rope scaling llama3",
    ),
    fault(
        "eps_not_read", "the norms use an eps that config.json does not say",
        lambda: configuration(
            lambda config: replace(config, rms_eps=1e-5 if config.rms_eps == 1e-6 else 1e-6)
        ),
        EXAMPLES, "E5", expected="phase0",
    ),
    fault(
        "eps_1e-5_for_1e-6", "norm kernels built with eps 1e-5 for 1e-6", lambda: _eps(1e-5),
        EXAMPLES + "/qwen25_0_5b", "E5",
        applies=lambda model: model.config().rms_eps == 1e-6, where="eps 1e-6",
    ),
    fault(
        "eps_1e-6_for_1e-5", "norm kernels built with eps 1e-6 for 1e-5", lambda: _eps(1e-6), entry="E5",
        applies=lambda model: model.config().rms_eps == 1e-5, where="eps 1e-5",
    ),
    fault(
        "bias_dropped", "QKV bias dropped", lambda: weights(_bias_times(0.0, "bq", "bk", "bv")), entry="E6",
        expected="phase2", applies=_biased, where="QKV bias",
    ),
    fault(
        "key_bias_dropped", "bias of K alone dropped", lambda: weights(_bias_times(0.0, "bk")), entry="E6",
        expected="phase2", applies=_biased, where="QKV bias",
    ),
    fault(
        "bias_twice", "QKV bias added twice", lambda: weights(_bias_times(2.0, "bq", "bk", "bv")), entry="E6",
        expected="phase2", applies=_biased, where="QKV bias",
    ),
    fault(
        "quantised_twice", "weights quantised again", lambda: loading(_quantised_again), EXAMPLES, "E30",
        expected="phase0",
    ),
    fault(
        "gqa_tiled", "query head h reads KV head h mod kv_heads", lambda: weights(tile_heads), entry="B6",
        expected="phase2", applies=grouped, where="more than one KV head, fewer than query heads",
    ),
    fault(
        "norm_plus_one", "1 added to the norm weights", lambda: weights(_norms_plus_one),
        "Gemma's norm convention", expected="phase2",
    ),
    fault("gate_up_swapped", "gate and up swapped in a middle layer", lambda: weights(_swap_gate_up)),
    fault("neighbour_weight", "K weight of the layer before", lambda: weights(_neighbour_weight)),
    fault(
        "stale_weights", "the device holds an older version of one weight, 3 % smaller",
        lambda: weights(_older_weights), EXAMPLES, "C2",
    ),
    fault(
        "final_norm_5_percent", "final norm 5 % too large", lambda: weights(_scaled_final_norm), entry="A26"
    ),
)  # fmt: skip
