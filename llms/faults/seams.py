"""Where faults of a deployment's own code are planted: functions of the toolkit, looked up at every call.

A fault changes what the device is given, never what the reference or the weight ledger sees.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import llms.llama_kernel_builder.deployment.session as session_module
from llms.llama_kernel_builder import host_ops, llama_loop
from llms.llama_kernel_builder.llama_loop import Pass
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.weights import ModelWeights
from npu_twin.faults._types import Plant

Array = np.ndarray[Any, Any]


def tokenizer_files(model: Any) -> tuple[dict[str, Any], str, str]:
    """Of an opened deployment, without loading the tokenizer: settings, chat template, post-processor."""
    folder: Path = model.checkpoint.path
    settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    separate = folder / "chat_template.jinja"
    template = settings.get("chat_template") or ""
    if separate.is_file():
        template = separate.read_text(encoding="utf-8")
    whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return settings, str(template), json.dumps(whole.get("post_processor"), ensure_ascii=False)


def token_text(settings: dict[str, Any], name: str) -> str:
    """Text of a special token in a tokenizer's settings, empty when it has none."""
    value = settings.get(name) or ""
    return str(value["content"] if isinstance(value, dict) else value)


def middle(config: ModelConfig) -> int:
    """Index of a layer in the middle."""
    return config.n_layers // 2


@contextlib.contextmanager
def weights(change: Callable[[ModelWeights, ModelConfig], None]) -> Iterator[None]:
    """Change what sessions write to the device; what they say they loaded stays right."""
    name = "pad_weights"
    right: Callable[..., ModelWeights] = getattr(session_module, name)

    def changed(loaded: ModelWeights, config: ModelConfig) -> ModelWeights:
        padded = right(loaded, config)
        result = replace(padded, layers=[replace(layer) for layer in padded.layers])
        change(result, config)
        return result

    with mock.patch.object(session_module, name, changed):
        yield


@contextlib.contextmanager
def loading(change: Callable[..., ModelWeights]) -> Iterator[None]:
    """Load weights by ``change(right, tensors, config)``: the ledger shows it."""
    name = "load_weights"
    right: Callable[..., ModelWeights] = getattr(session_module, name)
    with mock.patch.object(session_module, name, lambda *a: change(right, *a)):
        yield


@contextlib.contextmanager
def configuration(change: Callable[[ModelConfig], ModelConfig]) -> Iterator[None]:
    """Read another configuration than config.json states."""
    right = ModelConfig.from_hf_folder
    with mock.patch.object(ModelConfig, "from_hf_folder", lambda path: change(right(path))):
        yield


def table(change: Callable[[ModelConfig, int], Array]) -> Plant:
    """Build the RoPE tables of sessions otherwise."""
    return mock.patch.object(session_module, "rope_table", change)


@contextlib.contextmanager
def decode(change: Callable[..., Any]) -> Iterator[None]:
    """Replace the decode step by ``change(right, forward, x, run)``; `forward` is a `Pass`."""
    right = llama_loop.decode_step
    with mock.patch.object(llama_loop, "decode_step", lambda *a: change(right, *a)):
        yield


@contextlib.contextmanager
def prefill(change: Callable[..., Any]) -> Iterator[None]:
    """Replace the prefill by ``change(right, forward, ids, *runs)``; `forward` is a `Pass`."""
    right = llama_loop.prefill
    with mock.patch.object(llama_loop, "prefill", lambda *a: change(right, *a)):
        yield


@contextlib.contextmanager
def layers(
    in_prefill: Callable[..., tuple[Any, Any, Any]] | None = None, in_decode: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Replace the layers of a model.

    ``in_prefill(right, forward, run, x)`` returns (out, k, v) as ``right(run, x)`` does, ``in_decode`` with
    the same arguments returns out. `forward` is the `Pass`, `run` the `LayerRun` of the layer.
    """

    def changed(name: str, change: Callable[..., Any] | None) -> Callable[..., Any]:
        def with_layers(right: Any, forward: Pass, *rest: Any) -> Any:
            if change is not None:
                one = getattr(forward.sequence, name)
                new: Any = {name: lambda run, x: change(one, forward, run, x)}
                forward = replace(forward, sequence=replace(forward.sequence, **new))
            return right(forward, *rest)

        return with_layers

    with (
        prefill(changed("prefill_layer", in_prefill)),
        decode(changed("decode_layer", in_decode)),
    ):
        yield


@contextlib.contextmanager
def attention(change: Callable[[Array, Array, Array], tuple[Array, Array, Array]]) -> Iterator[None]:
    """Change query, keys and values in front of the attention of a decode step."""
    right = host_ops.decode_attention

    def changed(profiler: Any, q: Array, keys: Array, values: Array, heads: int) -> Array:
        return right(profiler, *change(q, keys, values), heads)

    with mock.patch.object(host_ops, "decode_attention", changed):
        yield
