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
from npu_twin.faults._types import Fault, Plant

Array = np.ndarray[Any, Any]

# Where the faults are described.
EXAMPLES = "Xilinx/mlir-air e972f2942, programming_examples/llms"
SKILLS = "Xilinx/mlir-air e972f2942, .claude/skills/"
PORTING = "porting mistake between Hugging Face transformers and a hand-written forward pass"
CACHE = "porting mistake in a KV cache kept by hand"


def fault(
    name: str, what: str, plant: Callable[[], Plant], origin: str = PORTING, entry: str = "", **more: Any
) -> Fault:
    """A fault, silent and caught by phase 3 unless `more` says otherwise."""
    kind, expected = more.pop("kind", "silent"), more.pop("expected", "phase3")
    return Fault(name, kind, what, origin, expected, plant, entry, **more)


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
def around(owner: Any, name: str, change: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module or class by ``change(right, *arguments)``; `right` is the one it has."""
    right = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *a, **options: change(right, *a, **options)):
        yield


def weights(change: Callable[[ModelWeights, ModelConfig], None]) -> Plant:
    """Change what sessions write to the device; what they say they loaded stays right."""

    def changed(
        right: Callable[..., ModelWeights], loaded: ModelWeights, config: ModelConfig
    ) -> ModelWeights:
        padded = right(loaded, config)
        result = replace(padded, layers=[replace(layer) for layer in padded.layers])
        change(result, config)
        return result

    return around(session_module, "pad_weights", changed)


def loading(change: Callable[..., ModelWeights]) -> Plant:
    """Load weights by ``change(right, tensors, config)``: the ledger shows it."""
    return around(session_module, "load_weights", change)


def configuration(change: Callable[[ModelConfig], ModelConfig]) -> Plant:
    """Read another configuration than config.json states."""
    return around(ModelConfig, "from_hf_folder", lambda right, path: change(right(path)))


def table(change: Callable[[ModelConfig, int], Array]) -> Plant:
    """Build the RoPE tables of sessions otherwise."""
    return mock.patch.object(session_module, "rope_table", change)


def decode(change: Callable[..., Any]) -> Plant:
    """Replace the decode step by ``change(right, forward, x, run)``; `forward` is a `Pass`."""
    return around(llama_loop, "decode_step", change)


def prefill(change: Callable[..., Any]) -> Plant:
    """Replace the prefill by ``change(right, forward, ids, *runs)``; `forward` is a `Pass`."""
    return around(llama_loop, "prefill", change)


@contextlib.contextmanager
def steps(change: Callable[..., Any], *, of_a_prompt: bool = True) -> Iterator[None]:
    """Replace the decode step by ``change(step, right, forward, x, run)``.

    `step` counts from 1, of every prompt, or else of all prompts together.
    """
    step = 0

    def start(right: Any, *arguments: Any) -> Any:
        nonlocal step
        step = 0 if of_a_prompt else step
        return right(*arguments)

    def counted(right: Any, *arguments: Any) -> Any:
        nonlocal step
        step += 1
        return change(step, right, *arguments)

    with prefill(start), decode(counted):
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

    with prefill(changed("prefill_layer", in_prefill)), decode(changed("decode_layer", in_decode)):
        yield


def attention(change: Callable[[Array, Array, Array], tuple[Array, Array, Array]]) -> Plant:
    """Change query, keys and values in front of the attention of a decode step."""
    return around(
        host_ops,
        "decode_attention",
        lambda right, profiler, q, keys, values, heads: right(profiler, *change(q, keys, values), heads),
    )
