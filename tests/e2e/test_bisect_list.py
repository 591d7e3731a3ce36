"""The six faults that every bisect must name, with kernel and layer: on a tiny model, and on SmolLM2-135M."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llms.llama_kernel_builder import driver
from llms.llama_kernel_builder.deployment import session
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.verify import localise as bisect
from llms.verify.contract.deployment import Deployment
from npu_twin import faults, injection
from npu_twin.listing import Launch, Listing

Array = np.ndarray[Any, Any]
Plant = Callable[[ModelConfig], AbstractContextManager[Any]]


@pytest.fixture(scope="module", params=["qwen2", pytest.param("smollm2_135m", marks=pytest.mark.slow)])
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    driver.select("twin")
    opened = Deployment.from_folder(request.param)
    yield opened
    opened.release_runners()


def rewritten(change: Callable[[Launch], Launch]) -> Plant:
    """Every listing, one launch after the other."""

    def every(listing: Listing) -> Listing:
        return replace(listing, launches=tuple(change(launch) for launch in listing.launches))

    return lambda config: injection.rewrite_listing(every)


def corrupted(name: str, change: Callable[[Mapping[str, Any], ModelConfig], None], layer: int) -> Plant:
    """One launch after it ran, in one layer."""

    def plant(config: ModelConfig) -> AbstractContextManager[Any]:
        calls = {"n": -1}

        def strike(launch: Launch, views: Mapping[str, Any]) -> None:
            if launch.name == name:
                calls["n"] += 1
                if calls["n"] % config.n_layers == layer:
                    change(views, config)

        return injection.corrupt_launch(strike)

    return plant


def f32(view: Any) -> Array:
    return np.asarray(view.u16).view(bfloat16).astype(np.float32)


def store(view: Any, values: Array) -> None:
    view.u16[...] = values.astype(bfloat16).view(np.uint16).reshape(view.u16.shape)


def interleaved(launch: Launch) -> Launch:
    return replace(launch, method="interleaved") if launch.op == "rope" else launch


def tiled_heads(views: Mapping[str, Any], config: ModelConfig) -> None:
    """Query head h reads KV head h modulo their number."""
    q, k, v = (f32(views[name]) for name in "qkv")
    rows, d, kv = q.shape[0], config.head_dim, config.n_kv_heads
    out = np.empty((rows, config.n_heads, d), np.float32)
    hidden = np.triu(np.ones((rows, rows), bool), 1)
    for head in range(config.n_heads):
        own, other = slice(head * d, (head + 1) * d), slice(head % kv * d, (head % kv + 1) * d)
        scores = q[:, own] @ k[:, other].T / d**0.5
        scores[hidden] = -np.inf
        weight = np.exp(scores - scores.max(1, keepdims=True))
        out[:, head] = weight @ v[:, other] / weight.sum(1, keepdims=True)
    store(views["out"], out)


def low_precision(launch: Launch) -> Launch:
    if launch.name != "down_gemm":
        return launch
    operands = {key: value for key, value in launch.operands.items() if key != "scratch"}
    return replace(launch, method="direct", operands=operands)


def last_tile_left_out(views: Mapping[str, Any], config: ModelConfig) -> None:
    a, b = f32(views["a"]), f32(views["b"])
    store(views["out"], a[:, :-32] @ b[:-32])


def swapped_gate_and_up(config: ModelConfig) -> AbstractContextManager[Any]:
    right = session.load_weights

    def swapped(*args: Any) -> Any:
        weights = right(*args)
        layer = weights.layers[1]
        layer.w_gate, layer.w_up = layer.w_up, layer.w_gate
        return weights

    return mock.patch.object(session, "load_weights", swapped)


def spoilt_rows(views: Mapping[str, Any], config: ModelConfig) -> None:
    values = f32(views["out"]).reshape(-1)
    values[64:96] = values[64:96] * 1.5 + 0.05
    store(views["out"], values)


@dataclass(frozen=True)
class Planted:
    """A fault and what bisect must say: launch, layer, path, and a word of the verdict."""

    plant: Plant
    launch: str
    layer: int
    path: str
    says: str = "first offender"


LIST = {
    "wrong rope": Planted(rewritten(interleaved), "rope_q", 0, "prefill"),
    "wrong GQA map": Planted(corrupted("attn", tiled_heads, 1), "attn", 1, "prefill"),
    "low-precision down projection": Planted(rewritten(low_precision), "down_gemm", 0, "prefill"),
    "corrupted K tiling": Planted(corrupted("k_gemm", last_tile_left_out, 2), "k_gemm", 2, "prefill"),
    "swapped gate and up": Planted(swapped_gate_and_up, "gate_gemm", 1, "prefill", "holds w_up of layer 1"),
    "bad decode GEMV": Planted(corrupted("up_gemv", spoilt_rows, 2), "up_gemv", 2, "decode", "elements off"),
}


@pytest.mark.parametrize("name", LIST)
def test_bisect_names_kernel_and_layer(deployment: Deployment, name: str) -> None:
    planted = LIST[name]
    deployment.release_runners()
    with planted.plant(deployment.config()):
        report = bisect.find(deployment, steps=2, confirm=name == "wrong GQA map")
    row = report.offender
    assert row is not None, report.text()
    assert (row.kernel.split(".")[-1], row.layer, row.path) == (planted.launch, planted.layer, planted.path)
    assert planted.says in report.verdict
    if name == "wrong GQA map" and deployment.name == "qwen2":
        assert report.confirmed is not None
        assert report.confirmed.healed, report.confirmed.note


@pytest.mark.parametrize(
    ("name", "part", "says"),
    [
        ("cache_not_reset", "cache state", "behind another prompt, V of layer 0"),
        ("last_of_ties", "token selection", "not those of the LM head"),
        ("nan_at_step_3", "token selection", "finite"),
        ("decode_start_without_eos", "prompt length", "returned prompt length"),
        ("prompt_cut", "prompt ids", "it is cut silently"),
    ],
)
def test_what_is_no_kernels_fault_is_said(deployment: Deployment, name: str, part: str, says: str) -> None:
    """No kernel is blamed for the host's loop, and the part of the loop is named with evidence."""
    fault = faults.find(name)
    if not fault.applies(deployment):
        assert name == "decode_start_without_eos"
        return
    deployment.release_runners()
    with fault.plant():
        report = bisect.find(deployment, steps=3)
    row = report.offender
    assert row is not None, report.text()
    assert row.kernel == part
    assert report.verdict.startswith("all kernels agree with their references in ")
    assert f"the difference is in the host's loop: {part}" in report.verdict
    assert says in report.verdict
    assert report.confirmed is None
