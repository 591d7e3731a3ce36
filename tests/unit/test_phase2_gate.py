"""Phase 2: a right layer passes, and each assembly fault of one layer is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llms.llama_kernel_builder import driver
from llms.llama_kernel_builder.deployment import session
from llms.llama_kernel_builder.resident import ResidentCache
from llms.llama_kernel_builder.weights import ModelWeights
from llms.verify.contract.deployment import NO_DEVICE, Deployment
from llms.verify.gates.phase2 import gate as phase2
from npu_twin import injection
from npu_twin.listing import Listing

LLMS = Path(__file__).resolve().parents[2] / "llms"


@pytest.fixture(scope="module")
def qwen2() -> Deployment:
    driver.select("twin")
    return Deployment.from_folder("qwen2", checkpoint=LLMS / "qwen2" / "tiny")


def gate(deployment: Deployment) -> Any:
    return phase2.block_gate(deployment, deployment.hf_reference(), deployment.prompts(2))


def test_a_right_layer_passes(qwen2: Deployment) -> None:
    outcome = gate(qwen2)
    assert outcome.ok, outcome.message
    payload = json.loads(json.dumps(outcome.payload))
    assert payload["one_layer"]
    assert payload["repeat_equal"]
    assert [(row["prompt"], row["path"]) for row in payload["rows"]] == [
        (0, "prefill"),
        (0, "decode"),
        (1, "prefill"),
        (1, "decode"),
    ]
    assert all(row["max_abs"] > 0 and row["max_rel"] > 0 for row in payload["rows"])


def test_one_prompt_is_not_enough(qwen2: Deployment) -> None:
    with pytest.raises(ValueError, match="needs two prompts"):
        phase2.block_gate(qwen2, qwen2.hf_reference(), qwen2.prompts(1))


@pytest.mark.parametrize(("head_dim", "limit"), [(64, 0.99), (80, 0.98), (128, 0.98), (256, 0.97)])
def test_limits_by_head_size(head_dim: int, limit: float) -> None:
    assert phase2.position_limit(head_dim) == limit


def change(op: str, **what: Any) -> Callable[[Listing], Listing]:
    def changed(listing: Listing) -> Listing:
        launches = tuple(
            replace(item, **{k: {**item.attrs, **v} if k == "attrs" else v for k, v in what.items()})
            if item.op == op
            else item
            for item in listing.launches
        )
        return replace(listing, launches=launches)

    return changed


@pytest.mark.parametrize(
    "fault",
    [
        change("rope", method="interleaved"),
        change("flash_attention", attrs={"causal": False}),
        change("rms_norm", attrs={"eps": 0.05}),
    ],
    ids=["interleaved rope", "no causal mask", "wrong eps"],
)
def test_a_kernel_that_does_something_else(qwen2: Deployment, fault: Callable[[Listing], Listing]) -> None:
    with injection.rewrite_listing(fault) as planted:
        outcome = gate(qwen2)
    assert planted.hits
    assert not outcome.ok
    assert "cosine" in outcome.message


def planted_weights(monkeypatch: pytest.MonkeyPatch, change_weights: Callable[[ModelWeights], None]) -> None:
    right = session.load_weights

    def load(*args: Any) -> ModelWeights:
        found = right(*args)
        change_weights(found)
        return found

    monkeypatch.setattr(session, "load_weights", load)


def tiled_heads(weights: ModelWeights) -> None:
    """Query head h reads KV head h % 2 instead of h // 2: the query heads in another order."""
    order = np.concatenate([np.arange(h * 64, (h + 1) * 64) for h in (0, 2, 1, 3)])
    for layer in weights.layers:
        layer.wq, layer.bq = layer.wq[order].copy(), layer.bq[order].copy()  # type: ignore[index]
        layer.wo = layer.wo[:, order].copy()


def no_key_bias(weights: ModelWeights) -> None:
    for layer in weights.layers:
        layer.bk = np.zeros_like(layer.bk)


def other_half(weights: ModelWeights) -> None:
    for layer in weights.layers:
        layer.w_gate, layer.w_up = layer.w_up, layer.w_gate


@pytest.mark.parametrize("fault", [tiled_heads, no_key_bias, other_half])
def test_weights_assembled_wrongly(
    qwen2: Deployment, monkeypatch: pytest.MonkeyPatch, fault: Callable[[ModelWeights], None]
) -> None:
    planted_weights(monkeypatch, fault)
    outcome = gate(qwen2)
    assert not outcome.ok
    assert {row["path"] for row in outcome.payload["rows"] if not row["ok"]} >= {"prefill"}


def test_a_common_factor(qwen2: Deployment) -> None:
    """A cosine is blind to it; the residual goes round the block, so the factor is at the block's end."""

    def grow(launch: Any, views: Any) -> None:
        if launch.name == "ffn_add":
            wide = (views["out"].u16.astype(np.uint32) << 16).view(np.float32) * np.float32(1.07)
            views["out"].u16[...] = (wide.view(np.uint32) >> 16).astype(np.uint16)

    with injection.corrupt_launch(grow):
        outcome = gate(qwen2)
    assert "times as large, limit 5%" in outcome.message
    assert "cosine" not in outcome.message


def test_activation_as_a_static_argument(qwen2: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written at the first call only: the second prompt runs on the first one's hidden state."""
    first: dict[str, Any] = {}
    right = ResidentCache._run

    def run(self: ResidentCache, bound: Any, inputs: Any) -> Any:
        if [bound.program.buffers[i].name for i in bound.inputs] == ["x"]:
            inputs = first.setdefault(bound.program.name, inputs)
        return right(self, bound, inputs)

    monkeypatch.setattr(ResidentCache, "_run", run)
    outcome = gate(qwen2)
    assert first.keys() >= {"rms_qkv_bias_rope_s128"}
    assert not outcome.ok
    assert "prompt 0" not in outcome.message
    assert "prompt 1, prefill" in outcome.message


def test_a_result_of_the_call_before(qwen2: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads before the device has written."""
    kept: dict[tuple[str, str], Any] = {}
    right = ResidentCache.fetch

    def fetch(self: ResidentCache, kernel: str, buffer: Any, bo: Any) -> Any:
        new = right(self, kernel, buffer, bo)
        if buffer.name != "out":
            return new
        old, kept[kernel, buffer.name] = kept.get((kernel, buffer.name), new), new
        return old

    monkeypatch.setattr(ResidentCache, "fetch", fetch)
    outcome = gate(qwen2)
    assert not outcome.ok
    assert "two prompts gave the same output" in outcome.message or "prompt 1" in outcome.message
    assert "another output the second time" in outcome.message


def test_values_that_are_not_finite_and_records_that_are_missing(qwen2: Deployment) -> None:
    prompts = qwen2.prompts(2)
    runs = [qwen2.hf_reference().run(prompt.ids, 2) for prompt in prompts]
    order = [(prompts[0], runs[0]), (prompts[1], runs[1]), (prompts[0], runs[0])]
    captures, _ = phase2._capture(qwen2, order, NO_DEVICE)
    assert phase2.judge(64, prompts, runs, captures, one_layer=True).ok

    record = captures[0].prefill
    layer = np.array(record.layer_intermediates[0]["ffn_out"])
    layer[3, 5] = np.nan
    spoilt = replace(captures[0], prefill=replace(record, layer_intermediates=[{"ffn_out": layer}]))
    found = phase2.judge(64, prompts, runs, [spoilt, captures[1], spoilt], one_layer=True)
    assert "prompt 0, prefill: values that are not finite" in found.message

    empty = replace(captures[0], prefill=replace(record, layer_intermediates=[]))
    found = phase2.judge(64, prompts, runs, [empty, captures[1], empty], one_layer=True)
    assert "prompt 0, prefill: layer 0 gave None" in found.message
