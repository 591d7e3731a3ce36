"""The HF reference: what it records, and when its disk cache may answer."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from llms.checkpoints import Checkpoint
from llms.verify.contract.capture import capture
from llms.verify.contract.topk import judge
from llms.verify.reference.cache import BYPASS_ENV, ReferenceCache
from llms.verify.reference.hf import HFReference, HFRunner

PROMPT = [3, 17, 5, 60, 22]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return Checkpoint(folder, "tiny random llama", "explicit", "a" * 64)


def test_the_run_equals_hf_generate(tiny: Checkpoint) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny.path, dtype=torch.bfloat16)
    ids = torch.tensor([PROMPT])
    expected = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, len(PROMPT) :]
    with torch.inference_mode():
        everything = model(ids, output_hidden_states=True)
    run = HFReference(tiny).run(PROMPT, 12)
    assert run.tokens == tuple(expected.tolist())
    assert run.fed == run.tokens[:-1]
    assert str(run.logits.dtype) == "bfloat16"
    assert run.logits.shape == (12, 96)
    assert run.prefill_layers.shape == (2, 5, 32)
    assert run.decode_layers.shape == (11, 2, 32)
    np.testing.assert_array_equal(run.logits[0].astype(np.float32), everything.logits[0, -1].float().numpy())
    # HF's own list gives the embedding, layer 0, and the *normed* output of the last layer.
    np.testing.assert_array_equal(
        run.prefill_layers[0].astype(np.float32), everything.hidden_states[1][0].float().numpy()
    )
    np.testing.assert_array_equal(
        run.prefill_final.astype(np.float32), everything.hidden_states[-1][0].float().numpy()
    )
    assert not np.array_equal(run.prefill_layers[1], run.prefill_final)


def test_the_runner_passes_the_gate_against_its_own_run(tiny: Checkpoint) -> None:
    run = HFReference(tiny).run(PROMPT)
    assert judge([capture(HFRunner(tiny), PROMPT).trace], [run.trace()]).ok


def test_prefill_resets_state_and_positions_are_checked(tiny: Checkpoint) -> None:
    runner = HFRunner(tiny)
    with pytest.raises(RuntimeError, match="before prefill"):
        runner.decode_step(1, 5)
    first = runner.prefill(np.array(PROMPT))
    runner.decode_step(first.top1_token, 5)
    with pytest.raises(RuntimeError, match="decode position 5, but the cache holds 6"):
        runner.decode_step(1, 5)
    again = runner.prefill(np.array(PROMPT))
    np.testing.assert_array_equal(first.logits_at_pred, again.logits_at_pred)


def test_a_released_model_is_loaded_again(tiny: Checkpoint) -> None:
    reference = HFReference(tiny)
    first, before = reference.run(PROMPT, 4), reference.runner
    reference.release()
    assert reference.run(PROMPT, 4).tokens == first.tokens
    assert reference.runner is not before


def test_a_reference_in_another_dtype_than_asked_for_is_refused(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    real = transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda *args, **kwargs: real(*args, **kwargs).float(),
    )
    with pytest.raises(ValueError, match=r"asked for in bfloat16.*torch.float32"):
        HFRunner(tiny)


def test_forced_tokens_are_fed_and_named_in_the_key(tiny: Checkpoint) -> None:
    reference = HFReference(tiny)
    free = reference.run(PROMPT, 4)
    forced = reference.run(PROMPT, 4, forced=[9, 9, 9])
    assert forced.fed == (9, 9, 9)
    assert not np.array_equal(free.logits[1], forced.logits[1])
    assert reference.key(PROMPT, 4) != reference.key(PROMPT, 4, [9, 9, 9])


def test_a_second_reference_is_answered_from_disk_without_a_model(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ReferenceCache(tmp_path)
    first = HFReference(tiny, cache=cache).run(PROMPT, 6)

    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(HFRunner, "__init__", no_model)
    second = HFReference(tiny, cache=cache)
    run = second.run(PROMPT, 6)
    assert (second.hits, second.computed) == (1, 0)
    for name in ("tokens", "fed", "prompt_ids"):
        assert getattr(run, name) == getattr(first, name)
    for name in ("logits", "prefill_layers", "prefill_final", "decode_layers", "decode_final"):
        np.testing.assert_array_equal(getattr(run, name), getattr(first, name))
        assert getattr(run, name).dtype == getattr(first, name).dtype


def test_a_shorter_run_is_the_beginning_of_the_gates_run(tiny: Checkpoint, tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path)
    HFReference(tiny, cache=cache).run(PROMPT)
    reading = HFReference(tiny, cache=cache)
    short, fresh = reading.run(PROMPT, 6), HFReference(tiny).run(PROMPT, 6)
    assert (reading.hits, reading.computed) == (1, 0)
    assert (short.tokens, short.fed) == (fresh.tokens, fresh.fed)
    for name in ("logits", "prefill_layers", "prefill_final", "decode_layers", "decode_final"):
        np.testing.assert_array_equal(getattr(short, name), getattr(fresh, name))


@pytest.mark.parametrize("change", ["checkpoint", "prompt", "tokens", "dtype", "torch", "transformers"])
def test_whatever_determines_a_run_changes_its_key(
    tiny: Checkpoint, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ReferenceCache(Path("unused"))
    before = cache.path(HFReference(tiny).key(PROMPT, 6))
    checkpoint, prompt, tokens, dtype = tiny, PROMPT, 6, "bfloat16"
    if change == "checkpoint":
        checkpoint = Checkpoint(tiny.path, tiny.label, tiny.kind, "b" * 64)
    elif change == "prompt":
        prompt = [*PROMPT[:-1], 23]
    elif change == "tokens":
        tokens = 7
    elif change == "dtype":
        dtype = "float32"
    else:
        import importlib.metadata

        real = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.0" if n == change else real(n))
    assert cache.path(HFReference(checkpoint, dtype=dtype).key(prompt, tokens)) != before


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other key"])
def test_a_damaged_entry_is_noticed_and_computed_again(
    tiny: Checkpoint, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ReferenceCache(tmp_path)
    reference = HFReference(tiny, cache=cache)
    good = reference.run(PROMPT, 5)
    path = cache.path(reference.key(PROMPT, 5))
    blob = bytearray(path.read_bytes())
    if damage == "flip":
        blob[-7] ^= 0x10
    elif damage == "cut":
        blob = blob[: len(blob) // 2]
    elif damage == "empty":
        blob = bytearray()
    else:
        reference.run(PROMPT[:-1], 5)
        blob = bytearray(cache.path(reference.key(PROMPT[:-1], 5)).read_bytes())
    path.write_bytes(bytes(blob))
    with caplog.at_level(logging.WARNING):
        again = HFReference(tiny, cache=cache)
        run = again.run(PROMPT, 5)
    assert again.computed == 1
    assert run.tokens == good.tokens
    assert "computing again" in caplog.text
    third = HFReference(tiny, cache=cache)
    third.run(PROMPT, 5)
    assert third.hits == 1


def test_the_cache_can_be_bypassed(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ReferenceCache(tmp_path)
    HFReference(tiny, cache=cache).run(PROMPT, 4)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    bypassing = HFReference(tiny, cache=None)
    bypassing.run(PROMPT, 4)
    bypassing.run(PROMPT, 3)
    assert (bypassing.hits, bypassing.computed) == (0, 2)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    monkeypatch.setenv(BYPASS_ENV, "1")
    assert ReferenceCache.default() is None
    monkeypatch.setenv(BYPASS_ENV, "0")
    assert ReferenceCache.default() is not None


def test_an_unwritable_cache_costs_time_not_the_run(tiny: Checkpoint, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("no folder can be made here")
    reference = HFReference(tiny, cache=ReferenceCache(blocker / "cache"))
    assert len(reference.run(PROMPT, 3).tokens) == 3


def test_a_model_without_an_identity_is_never_cached(tiny: Checkpoint, tmp_path: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny.path, dtype=torch.bfloat16)
    reference = HFReference(tiny, cache=ReferenceCache(tmp_path), model=model)
    reference.run(PROMPT, 3)
    assert list(tmp_path.iterdir()) == []
    given = reference.runner
    reference.release()
    assert reference.runner is given  # a given model is never replaced by one from the folder


def test_bad_requests_are_refused(tiny: Checkpoint) -> None:
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        HFReference(tiny, dtype="float16")
    with pytest.raises(ValueError, match="at least one prompt token"):
        HFReference(tiny).run([], 4)
    with pytest.raises(ValueError, match="3 forced ones"):
        HFReference(tiny).run(PROMPT, 4, forced=[1])


_WRITER = """
import sys, numpy as np
from pathlib import Path
from llms.verify.reference.cache import ReferenceCache
cache = ReferenceCache(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    cache.store({"k": 1}, {"x": np.zeros(4_000_000, np.float32)})
"""


def test_a_killed_writer_leaves_a_whole_entry_or_none(tmp_path: Path) -> None:
    for delay in (0.02, 0.05, 0.09):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        stored = ReferenceCache(tmp_path).load({"k": 1})
        entry = ReferenceCache(tmp_path).path({"k": 1})
        assert (stored is None) == (not entry.exists())
