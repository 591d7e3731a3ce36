"""Bisect names the planted kernel, layer, buffer or host operation, and nothing on a clean deployment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llms.llama_kernel_builder import driver, host_ops, llama_loop
from llms.llama_kernel_builder.deployment import session
from llms.qwen2 import qwen2_inference as inference
from llms.verify import localise as bisect
from llms.verify.contract.deployment import Deployment
from npu_twin import faults, injection
from npu_twin.listing import Launch, Listing

LAYER = 1


@pytest.fixture(scope="module")
def qwen2() -> Iterator[Deployment]:
    driver.select("twin")
    opened = Deployment.from_folder("qwen2")
    yield opened
    opened.release_runners()


def find(deployment: Deployment, **options: Any) -> bisect.BisectReport:
    deployment.release_runners()
    return bisect.find(deployment, **{"steps": 3, **options})


def first(report: bisect.BisectReport) -> tuple[str, int, str]:
    """Launch (without its program), layer and path of the offender."""
    row = report.offender
    assert row is not None, report.text()
    return row.kernel.split(".")[-1], row.layer, row.path


def rewrite(change: Callable[[Launch], Launch]) -> Any:
    def every(listing: Listing) -> Listing:
        return replace(listing, launches=tuple(change(launch) for launch in listing.launches))

    return injection.rewrite_listing(every)


def corrupt(name: str, change: Callable[[Mapping[str, Any]], None], *, layer: int | None = None) -> Any:
    """Corrupt one launch after it ran, in one layer (the n-th of a row of three) or in all."""
    calls = {"n": -1}

    def strike(launch: Launch, views: Mapping[str, Any]) -> None:
        if launch.name == name:
            calls["n"] += 1
            if layer is None or calls["n"] % 3 == layer:
                change(views)

    return injection.corrupt_launch(strike)


def f32(view: Any) -> np.ndarray[Any, Any]:
    return np.asarray(view.u16).view(bfloat16).astype(np.float32)


def store(view: Any, values: np.ndarray[Any, Any]) -> None:
    view.u16[...] = values.astype(bfloat16).view(np.uint16).reshape(view.u16.shape)


def test_clean(qwen2: Deployment) -> None:
    report = find(qwen2)
    assert "decode was not compared" not in report.text()
    assert report.offender is None, report.text()
    assert report.confirmed is None
    assert "stands out" in report.verdict
    kinds = {row.kind for row in report.rows}
    assert kinds == {"kernel", "host", "static"}
    assert {row.layer for row in report.rows} == {0, 1, 2, 3}


@pytest.mark.slow
def test_rope_interleaved_in_the_builder(qwen2: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(block: Any) -> Any:
        steps = tuple(
            replace(step, spec=replace(step.spec, method="interleaved")) if step.label == "rope_k" else step
            for step in block.steps
        )
        return replace(block, steps=steps)

    right = inference.SEQUENCE
    wrong = replace(right, prefill_blocks=lambda config, s: right.prefill_blocks(config, s).map(turned))
    monkeypatch.setattr(inference, "SEQUENCE", wrong)
    report = find(qwen2)
    assert first(report) == ("rope_k", 0, "prefill")
    assert "decode was not compared" in report.text()
    assert report.confirmed is not None
    assert report.confirmed.healed, report.confirmed.note


@pytest.mark.slow
def test_rope_table_of_another_theta(qwen2: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    right = session.rope_table
    monkeypatch.setattr(
        session, "rope_table", lambda config, n: right(replace(config, rope_theta=config.rope_theta / 10), n)
    )
    report = find(qwen2)
    assert first(report)[0].startswith("rope_")
    assert report.offender is not None
    assert report.offender.kind == "static"
    assert "angles" in report.verdict


@pytest.mark.slow
def test_gqa_map_of_the_hosts_attention(qwen2: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    right = host_ops.decode_attention

    def tile(profiler: Any, q: Any, keys: Any, values: Any, heads: int) -> Any:
        order = [h % keys.shape[0] for h in range(heads)]
        return right(profiler, q, keys[order], values[order], heads)

    monkeypatch.setattr(host_ops, "decode_attention", tile)
    report = find(qwen2, path="decode")
    assert first(report) == ("decode_attention_cpu", 0, "decode")
    assert "GQA" in report.verdict


@pytest.mark.slow
def test_gate_and_up_buffers_swapped_in_the_builder(
    qwen2: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crossed(block: Any) -> Any:
        steps = tuple(
            replace(step, operands={**step.operands, "gate": "up", "up": "gate"})
            if step.label == "silu_mul"
            else step
            for step in block.steps
        )
        return replace(block, steps=steps)

    right = inference.SEQUENCE
    wrong = replace(right, decode_blocks=lambda config: right.decode_blocks(config).map(crossed))
    monkeypatch.setattr(inference, "SEQUENCE", wrong)
    report = find(qwen2)
    assert first(report) == ("silu_mul", 0, "decode")


def test_one_wrong_element_of_a_decode_gemv(qwen2: Deployment) -> None:
    def spoil(views: Mapping[str, Any]) -> None:
        values = f32(views["out"]).reshape(-1)
        values[7] = values[7] * 1.5 + 0.05
        store(views["out"], values)

    with corrupt("up_gemv", spoil, layer=2):
        report = find(qwen2)
    assert first(report) == ("up_gemv", 2, "decode")
    assert "elements off" in report.verdict


@pytest.mark.slow
def test_kv_written_one_slot_late(qwen2: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    right = llama_loop.decode_step

    def late(forward: Any, *rest: Any) -> Any:
        position = forward.position
        found = right(forward, *rest)
        for array in (forward.cache.k, forward.cache.v):
            array[:, :, position + 1] = array[:, :, position]
            array[:, :, position] = 0
        return found

    monkeypatch.setattr(llama_loop, "decode_step", late)
    report = find(qwen2)
    assert report.offender is not None
    assert report.offender.kernel == "kv_cache"
    assert "it is in slot" in report.verdict


@pytest.mark.slow
def test_decode_position_one_late(qwen2: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    right = llama_loop.decode_step

    def late(forward: Any, *rest: Any) -> Any:
        return right(replace(forward, rope_lut=forward.rope_lut[1:]), *rest)

    monkeypatch.setattr(llama_loop, "decode_step", late)
    report = find(qwen2)
    assert first(report)[2] == "decode"
    assert "those of position" in report.verdict


@pytest.mark.slow
def test_layer_skipped(qwen2: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    right = inference.SEQUENCE

    def skip(run: Any, x: Any) -> Any:
        out, k, v = right.prefill_layer(run, x)
        return (x if run.index == LAYER else out), k, v

    monkeypatch.setattr(inference, "SEQUENCE", replace(right, prefill_layer=skip))
    report = find(qwen2)
    assert report.offender is not None
    assert report.offender.layer == LAYER + 1
    assert f"not the output of layer {LAYER}" in report.verdict


@pytest.mark.slow
def test_norm_weight_plus_one(qwen2: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    right = session.load_weights

    def plus(*args: Any) -> Any:
        weights = right(*args)
        weights.layers[LAYER].ffn_norm = (weights.layers[LAYER].ffn_norm.astype(np.float32) + 1).astype(
            bfloat16
        )
        return weights

    monkeypatch.setattr(session, "load_weights", plus)
    report = find(qwen2)
    assert first(report) == ("ffn_rms", LAYER, "prefill")
    assert report.offender is not None
    assert report.offender.kind == "static"


@pytest.mark.slow
def test_fault_of_a_later_step(qwen2: Deployment) -> None:
    with faults.find("late_decode_fault").plant():
        report = find(qwen2, path="decode", steps=12)
    assert report.offender is not None
    assert report.offender.step >= 2
    assert "step 1" in report.verdict
