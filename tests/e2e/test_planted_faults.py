"""One fault at a time in the real model on the twin, and the check that names it.

Measured on SmolLM2-135M-Instruct (Q4_1 dequantised to bf16), twin, first instruct prompt: the lowest
median cosine of a layer is 0.988 clean and below 0.6 with a middle layer skipped; `gates.MEDIAN_LIMIT`
stands between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llms.llama_kernel_builder import driver, llama_loop
from llms.llama_kernel_builder.weights import ModelWeights
from llms.smollm2_135m import smollm2_135m_inference as inference
from llms.verify.contract.capture import capture, capture_diagnosis
from llms.verify.contract.deployment import Deployment
from llms.verify.contract.topk import judge
from llms.verify.gates.phase6 import gate as gates
from llms.verify.gates.phase6.diagnosis import diagnose
from npu_twin import injection
from npu_twin.listing import Listing

N_TOKENS = 32


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Deployment]:
    driver.select("twin")
    opened = Deployment.from_folder("smollm2_135m")
    yield opened
    opened.release_runners()


def verdicts(smollm2: Deployment) -> dict[str, Any]:
    """Judge one prompt by token-set gate and diagnosis on the module's one runner, contexts opened anew."""
    prompt = smollm2.prompts(1)[0]
    max_seq = gates.sequence_length([prompt], N_TOKENS)
    smollm2.runner(max_seq).session.cache.runtime.close_contexts()  # type: ignore[attr-defined]
    run = smollm2.hf_reference().run(prompt.ids, N_TOKENS)
    captured = capture(smollm2.runner(max_seq), prompt.ids, n_tokens=N_TOKENS)
    topk = judge([captured.trace], [run.trace()], n_tokens=N_TOKENS)
    short = smollm2.hf_reference().run(prompt.ids, 9)
    inside = capture_diagnosis(smollm2.runner(max_seq), prompt.ids, short.fed)
    return {"topk": topk, "diagnosis": gates.diagnosis_problems(diagnose(inside, short))}


def test_clean_twin_raises_no_alarm(smollm2: Deployment) -> None:
    found = verdicts(smollm2)
    assert found["topk"].ok, found["topk"].reasons
    assert found["diagnosis"] == []


def test_skipped_layer_is_named(smollm2: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = 15
    right = inference.SEQUENCE

    def prefill_layer(run: Any, x: Any) -> Any:
        out, k, v = right.prefill_layer(run, x)
        return (x, k, v) if run.index == skipped else (out, k, v)

    def decode_layer(run: Any, x: Any) -> Any:
        out = right.decode_layer(run, x)
        return x if run.index == skipped else out

    monkeypatch.setattr(
        inference, "SEQUENCE", replace(right, prefill_layer=prefill_layer, decode_layer=decode_layer)
    )
    problems = verdicts(smollm2)["diagnosis"]
    assert any(f"layers {skipped - 1} and {skipped} are bitwise equal" in text for text in problems), problems
    for path in ("prefill", "decode"):
        named = [text for text in problems if text.startswith(f"{path}: layer ")]
        assert named, problems
        assert int(named[0].split()[2]) >= skipped, problems


def test_dropped_causal_mask(smollm2: Deployment) -> None:
    def unmask(listing: Listing) -> Listing:
        launches = tuple(
            replace(launch, attrs={**launch.attrs, "causal": False})
            if launch.op == "flash_attention"
            else launch
            for launch in listing.launches
        )
        return replace(listing, launches=launches)

    with injection.rewrite_listing(unmask) as fault:
        found = verdicts(smollm2)
    assert fault.hits > 0
    assert not found["topk"].ok
    assert any(text.startswith("prefill: layer 0 ") for text in found["diagnosis"]), found["diagnosis"]


def test_kv_heads_tiled_instead_of_grouped(smollm2: Deployment) -> None:
    """Query head h reads KV head h % 3: planted by reordering the query heads around the right kernel."""

    def tile(weights: ModelWeights) -> None:
        heads, kv, d = 9, 3, 64
        order = [h for group in range(kv) for h in range(heads) if h % kv == group]
        columns = np.concatenate([np.arange(h * d, (h + 1) * d) for h in order])
        for layer in weights.layers:
            layer.wq = np.ascontiguousarray(layer.wq[columns])
            layer.wo = np.ascontiguousarray(layer.wo[:, columns])

    smollm2.release_runners()
    max_seq = gates.sequence_length(smollm2.prompts(1), N_TOKENS)
    tile(smollm2.runner(max_seq).session.weights)  # type: ignore[attr-defined]
    found = verdicts(smollm2)
    smollm2.release_runners()
    assert not found["topk"].ok
    assert any(text.startswith("prefill: layer 0 ") for text in found["diagnosis"]), found["diagnosis"]
    assert any(text.startswith("decode: layer 0 ") for text in found["diagnosis"]), found["diagnosis"]


def test_nan_at_step_three(smollm2: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = llama_loop.head

    def head(*args: Any) -> Any:
        logits = right(*args)
        calls.append(1)
        if len(calls) == 4:
            logits[7] = np.nan
        return logits

    monkeypatch.setattr(llama_loop, "head", head)
    found = verdicts(smollm2)["topk"]
    assert not found.ok
    assert "step 3" in " ".join(found.reasons), found.reasons
    assert "finite" in " ".join(found.reasons), found.reasons


@pytest.mark.parametrize("launch", ["rope_k", "ffn_add"])
def test_launch_removed_from_the_compiled_listing(smollm2: Deployment, launch: str) -> None:
    def remove(listing: Listing) -> Listing:
        names = [item.name for item in listing.launches]
        return injection.remove_launch(launch)(listing) if launch in names else listing

    with injection.rewrite_listing(remove) as fault:
        found = verdicts(smollm2)
    assert fault.hits > 0
    assert not found["topk"].ok
    assert any("layer 0" in text for text in found["diagnosis"]), found["diagnosis"]


@pytest.mark.parametrize("direction", ["to_device", "from_device"])
def test_missing_sync(smollm2: Deployment, direction: Any) -> None:
    """A sync of the hidden state [128, 576] that never happens: poison or a stale value goes on.

    To the device it goes once per prompt, as activations stay there: with the same prompt before it, the
    stale value would be the right one, so the buffers are new.
    """
    smollm2.release_runners()
    skip = 20 if direction == "from_device" else 0
    with injection.drop_sync(direction, nbytes=128 * 576 * 2, times=None, skip=skip) as fault:
        found = verdicts(smollm2)
    smollm2.release_runners()  # weights and tables that never arrived would outlive the fault
    assert fault.hits > 0
    assert not found["topk"].ok
    assert found["diagnosis"]


def test_faults_are_gone_afterwards(smollm2: Deployment) -> None:
    found = verdicts(smollm2)
    assert found["topk"].ok
    assert found["diagnosis"] == []
