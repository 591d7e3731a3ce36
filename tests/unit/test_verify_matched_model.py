"""Injection into Hugging Face's models: strict, complete, for three families; and runs on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16

from llms.checkpoints import Checkpoint
from llms.verify.ladder.stats import kl
from llms.verify.reference.arithmetic import (
    AttentionArithmetic,
    DeviceArithmetic,
    LinearArithmetic,
    PhaseArithmetic,
)
from llms.verify.reference.arithmetic.description import LINEARS, PUBLISHED_FLOOR
from llms.verify.reference.cache import ReferenceCache
from llms.verify.reference.matched import MatchedReference
from llms.verify.reference.matched_model import InjectionError, MatchedModel

PROMPT = (3, 17, 5, 60, 22, 8, 9, 41, 77, 2, 13)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


def device(linear: str = "drain", rounding: Any = PUBLISHED_FLOOR, bucket: int = 128) -> DeviceArithmetic:
    """The arithmetic of our deployments at small sizes."""
    return DeviceArithmetic(
        PhaseArithmetic(
            dict.fromkeys(LINEARS, LinearArithmetic(linear)),  # type: ignore[arg-type]
            AttentionArithmetic("flash", bucket, 2, depth=16),
            rounding,
        ),
        PhaseArithmetic(
            dict.fromkeys(LINEARS, LinearArithmetic("gemv")), AttentionArithmetic("host"), rounding
        ),
        LinearArithmetic("gemv"),
    )


def host() -> DeviceArithmetic:
    """f32 everywhere with one cast per operation: what plain bf16 code does."""
    phase = PhaseArithmetic(dict.fromkeys(LINEARS, LinearArithmetic("host")), AttentionArithmetic("host"))
    return DeviceArithmetic(phase, phase, LinearArithmetic("host"))


def build(family: str) -> Any:
    import transformers

    torch.manual_seed(7)
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    more = {"head_dim": 16} if family == "qwen3" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(torch.bfloat16).eval()


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_host_arithmetic_is_plain_hf(family: str) -> None:
    """With everything on the host the injected model says what the untouched one says, prompt and decode."""
    plain = build(family)
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([[*PROMPT, 4]])).logits[0, -2:].float().numpy()
    model = MatchedModel(build(family))
    found = [model.prefill(PROMPT, host()), model.decode(4)]
    for ours, theirs in zip(found, expected, strict=True):
        assert float(kl(theirs, ours)) < 2e-4
        assert np.abs(ours.astype(np.float32) - theirs).max() < 0.05


def test_device_arithmetic_differs_a_little(family: str) -> None:
    there, here = MatchedModel(build(family)), MatchedModel(build(family))
    exact, rounded = there.prefill(PROMPT, host()), here.prefill(PROMPT, device())
    assert 1e-8 < float(kl(exact, rounded)) < 0.05


def test_every_part_of_the_description_matters(family: str) -> None:
    """No part of the arithmetic is ignored: changing any role changes the logits."""
    model = MatchedModel(build(family))
    before = model.prefill(PROMPT, device()).tobytes()
    needed = {"input_norm", "post_norm", "rope", "attn_add", "mlp_add", "activation"}
    needed |= {"qwen2": {"bias"}, "qwen3": {"qk_norm"}}.get(family, set())
    for role in PUBLISHED_FLOOR:
        changed = model.prefill(PROMPT, device(rounding={**PUBLISHED_FLOOR, role: "nearest_even"})).tobytes()
        assert (changed != before) == (role in needed), role
    for name in LINEARS:
        arithmetic = device()
        arithmetic.prefill.linears[name] = LinearArithmetic("fused-cast")  # type: ignore[index]
        assert model.prefill(PROMPT, arithmetic).tobytes() != before, name


def test_padding_changes_only_shared_blocks() -> None:
    """Eleven tokens: the pad token shows in the last block of eight only, whatever the compiled length."""
    model = MatchedModel(build("llama"))
    runs = []
    for pad, bucket in ((0, 128), (0, 256), (5, 128)):
        arithmetic = DeviceArithmetic(device(bucket=bucket).prefill, host().decode, host().lm_head, pad)
        model.prefill(PROMPT, arithmetic)
        runs.append(model.kv_cache())
    assert all(keys.shape[2] == len(PROMPT) for keys, _ in runs)
    assert runs[0][1].tobytes() == runs[1][1].tobytes()
    assert runs[0][1][:, :, :8].tobytes() == runs[2][1][:, :, :8].tobytes()


@pytest.mark.parametrize("hidden", [128, 100])
def test_order_of_sums_is_worth_little(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns behind the last whole block (100 = 12 * 8 + 4) are not lost when the blocks are permuted."""
    monkeypatch.setitem(SIZES, "intermediate_size", hidden)
    plain, shuffled = MatchedModel(build("llama")), MatchedModel(build("llama"), reorder=3)
    a, b = (model.prefill(PROMPT, device()) for model in (plain, shuffled))
    assert float(kl(a, b)) < 1e-3


def test_layers_start_from_what_is_given() -> None:
    """Given a device's hidden states, each layer's output depends on its own input alone."""
    model = MatchedModel(build("llama"))
    model.prefill(PROMPT, device())
    n = len(PROMPT)
    first = np.zeros((2, n, 64), bfloat16)
    with model.given(first) as seen:
        model.prefill(PROMPT, device())
    own = [layer[:n].copy() for layer in seen]
    with model.given(np.stack([own[0], own[1]])) as seen:
        logits = model.prefill(PROMPT, device())
    assert seen[0][:n].tobytes() == own[0].tobytes()
    assert seen[1][:n].tobytes() != own[1].tobytes(), "layer 1 started from zeros the first time"
    true_last = seen[1][:n].copy()
    with model.given(np.stack([own[0], true_last])):
        chained = model.prefill(PROMPT, device())
    assert chained.tobytes() == model.prefill(PROMPT, device()).tobytes()
    assert logits.tobytes() != chained.tobytes()


def test_decode_from_a_given_cache() -> None:
    model = MatchedModel(build("qwen2"))
    model.prefill(PROMPT, device())
    keys, values = model.kv_cache()
    right = model.decode(4)
    model.replace_cache(keys, values)
    assert model.decode(4).tobytes() == right.tobytes()
    keys = keys.copy()
    keys[1, 0, 3] = 0
    model.replace_cache(keys, values)
    assert model.decode(4).tobytes() != right.tobytes()


def test_decode_steps_as_rows(family: str) -> None:
    """Steps run one by one and run as rows of one pass differ by the order of f32 sums at most."""
    model = MatchedModel(build(family))
    model.prefill(PROMPT, device())
    prefix = model.kv_cache()
    fed, single, outputs = (4, 9, 30, 71, 5, 6), [], []
    for token in fed:
        with model.given(np.empty((2, 0, 64), bfloat16)) as seen:
            single.append(model.decode(token))
        outputs.append(np.stack(seen)[:, 0])
    keys, values = model.kv_cache()
    rows = model.decode_rows(fed, *prefix, np.stack(outputs, axis=1))
    for whole, part in ((keys, rows.keys), (values, rows.values)):
        difference = np.abs(whole[:, :, len(PROMPT) :].astype(np.float32) - part.astype(np.float32))
        assert difference.max() < 0.05
        assert (difference > 0).mean() < 0.02
    assert float(kl(np.stack(single), rows.logits).max()) < 1e-4
    assert np.abs(np.stack(outputs, 1).astype(np.float32) - rows.outputs.astype(np.float32)).max() < 0.05


def test_other_architectures_are_refused() -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32)
    with pytest.raises(InjectionError, match="gpt2"):
        MatchedModel(transformers.GPT2LMHeadModel(config).to(torch.bfloat16))
    with pytest.raises(InjectionError, match="bf16"):
        MatchedModel(build("llama").float())


def test_unknown_modules_are_refused() -> None:
    model = build("llama")
    model.model.layers[1].self_attn.extra = torch.nn.Linear(4, 4)
    with pytest.raises(InjectionError, match=r"self_attn\.extra"):
        MatchedModel(model)


def test_changed_model_code_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of another transformers version that bypasses or rearranges a launch is an error."""
    from transformers.models.llama import modeling_llama

    model = MatchedModel(build("llama"))

    def scaled(self: Any, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)).mul(0.5) * self.up_proj(x)) * 2

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", scaled)
    with pytest.raises(InjectionError, match=r"applies '.*mul.*' where the device has a launch 'mul'"):
        model.prefill(PROMPT, device())

    def without(self: Any, x: Any) -> Any:
        return self.down_proj(self.up_proj(x))

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", without)
    with pytest.raises(InjectionError, match="launches made and expected"):
        model.prefill(PROMPT, device())


def test_decode_before_prefill() -> None:
    with pytest.raises(RuntimeError, match="before prefill"):
        MatchedModel(build("llama")).decode(1)


@pytest.fixture
def folder(tmp_path: Path) -> Checkpoint:
    build("llama").save_pretrained(tmp_path / "model")
    return Checkpoint(tmp_path / "model", "tiny", "explicit", "c" * 64)


def test_runs_are_cached_by_content(folder: Checkpoint, tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path / "cache")
    first = MatchedReference(folder, cache=cache)
    run = first.run(PROMPT, 4, arithmetic=device())
    assert run.fed == run.tokens[:3]
    assert run.keys.shape == (2, 2, len(PROMPT) + 3, 16)
    again = MatchedReference(folder, cache=cache)
    stored = again.run(PROMPT, 4, arithmetic=device())
    assert (again.hits, again.computed) == (1, 0)
    assert stored.tokens == run.tokens
    assert stored.logits.tobytes() == run.logits.tobytes()
    assert stored.values.tobytes() == run.values.tobytes()
    again.run(PROMPT, 4, arithmetic=device("fused-cast"))
    again.run(PROMPT, 4, arithmetic=device(), forced=(1, 2, 3))
    MatchedReference(folder, cache=cache, reorder=1).run(PROMPT, 4, arithmetic=device())
    assert again.computed == 2
    bypassing = MatchedReference(folder)
    bypassing.run(PROMPT, 2, arithmetic=device())
    assert (bypassing.hits, bypassing.computed) == (0, 1)


def test_key_covers_the_source_of_the_arithmetic(folder: Checkpoint) -> None:
    key = MatchedReference(folder).key(PROMPT, 4, device())
    assert len(key["implementation"]) == 64
    assert key["arithmetic"]["prefill"]["attention"]["length"] == 128


def test_bad_requests(folder: Checkpoint) -> None:
    reference = MatchedReference(folder)
    with pytest.raises(ValueError, match="at least one"):
        reference.run((), 4, arithmetic=device())
    with pytest.raises(ValueError, match="need 3 forced"):
        reference.run(PROMPT, 4, arithmetic=device(), forced=(1,))
