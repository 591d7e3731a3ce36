"""The rungs against a small model that plays the device: clean, and with one fault at a time.

The device is a second injected model whose sums run in another order, so the clean case is not bit equal by
construction; faults are planted in what it does between the calls. Limits are set here, near what the clean
device measures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llms.checkpoints import Checkpoint
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import Deployment
from llms.verify.contract.records import DecodeProbe, DecodeStepRecord, PrefillRecord
from llms.verify.ladder.calibration import calibrated
from llms.verify.ladder.climbing import Ladder
from llms.verify.ladder.thresholds import Limit, ThresholdError, Thresholds, load_file
from llms.verify.ladder.types import Judge, LadderOutcome
from llms.verify.reference.arithmetic import (
    AttentionArithmetic,
    DeviceArithmetic,
    LinearArithmetic,
    PhaseArithmetic,
)
from llms.verify.reference.arithmetic.description import LINEARS, PUBLISHED_FLOOR
from llms.verify.reference.cache import ReferenceCache
from llms.verify.reference.hf import HFReference
from llms.verify.reference.matched import MatchedReference

N_TOKENS = 8
MAX_SEQ = 24
PROMPTS = (
    EncodedPrompt("one", (3, 17, 5, 60, 22, 8, 9, 41, 77), "base"),
    EncodedPrompt("two", (60, 22, 8, 9, 33, 11, 90), "base"),
)
ARITHMETIC = DeviceArithmetic(
    PhaseArithmetic(
        dict.fromkeys(LINEARS, LinearArithmetic("drain")),
        AttentionArithmetic("flash", 128, 2, depth=16),
        PUBLISHED_FLOOR,
    ),
    PhaseArithmetic(
        dict.fromkeys(LINEARS, LinearArithmetic("gemv")), AttentionArithmetic("host"), PUBLISHED_FLOOR
    ),
    LinearArithmetic("gemv"),
)
# Clean, over both prompts: KL 2e-5, layer errors 4e-3, slots 2e-3; self-consistency and limits 2e-2.
LIMITS = {
    "teacher_forced": 1e-3,
    "teacher_forced.tie_ulps": 3.0,
    "cache_check": 0.02,
    "layer_check": 0.02,
    "layer_check.logits": 1e-4,
    "edges": 0.02,
    "edges.logits": 1e-4,
    "plain_reference": 0.2,
    "self_consistency": 0.05,
    "limits": 0.05,
}


class FixedThresholds(Thresholds):
    """Limits per rung, statistic by statistic where named."""

    def __init__(self) -> None:
        super().__init__({})

    def __getitem__(self, statistic: str) -> Limit:
        value = LIMITS.get(statistic, LIMITS[statistic.split(".")[0]])
        return Limit(statistic, value, value / 2, ("some_fault", value * 9), "tiny model, today")


class Tokenizer:
    """Decodes ids to words."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


def build() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.15,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("qwen3")
    build().save_pretrained(folder)
    return Checkpoint(folder, "tiny", "explicit", "e" * 64)


class Plain:
    """A runner with the contract's own two functions and nothing else."""

    name = "played device"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.length = 0

    def prefill(self, prompt_tokens: Any) -> PrefillRecord:
        ids = [int(token) for token in prompt_tokens]
        if len(ids) > MAX_SEQ:
            raise ValueError(f"{len(ids)} tokens do not fit {MAX_SEQ}")
        return self._prefill(ids)[0]

    def _prefill(self, ids: list[int]) -> tuple[PrefillRecord, list[Any]]:
        seen: list[Any] = []
        with self._watching(seen):
            logits = self.model.prefill(ids, ARITHMETIC).astype(np.float32)
        self.length = len(ids)
        layers = [{"ffn_out": layer[: len(ids)]} for layer in seen]
        return PrefillRecord(layers, np.empty(0, np.float32), logits, int(logits.argmax())), seen

    def decode_step(self, input_token: int, current_pos: int) -> DecodeStepRecord:
        return self._decode(input_token, current_pos)[0]

    def _decode(self, token: int, position: int) -> tuple[DecodeStepRecord, list[Any]]:
        if position >= MAX_SEQ:
            raise ValueError(f"position {position} is outside the cache of {MAX_SEQ}")
        seen: list[Any] = []
        with self._watching(seen):
            logits = self.model.decode(token).astype(np.float32)
        self.length += 1
        return DecodeStepRecord(logits, int(logits.argmax())), seen

    @contextmanager
    def _watching(self, seen: list[Any]) -> Iterator[None]:
        from llms.verify.reference.hf import to_numpy

        handles = [
            layer.register_forward_hook(lambda _m, _i, out: seen.append(to_numpy(out)[0]))
            for layer in self.model.layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Full(Plain):
    """All abilities, and one planted fault (``kind``)."""

    def __init__(self, model: Any, kind: str = "clean") -> None:
        super().__init__(model)
        self.kind = kind
        self.calls = 0
        self.steps = 0

    def device_arithmetic(self, prompt_len: int) -> DeviceArithmetic:
        return ARITHMETIC

    def prompt_limits(self) -> tuple[int, ...]:
        return (16, MAX_SEQ)

    def prefill(self, prompt_tokens: Any) -> PrefillRecord:
        self.calls += 1
        self.steps = 0
        ids = [int(token) for token in prompt_tokens]
        if self.kind == "truncates":
            ids = ids[:MAX_SEQ]
        ids = [self._token(token) for token in ids]
        if self.kind == "one token" and len(ids) == 1:
            ids = [4]
        record = super().prefill(ids)
        if self.kind == "views":
            last = record.layer_intermediates[-1]
            record = PrefillRecord(
                [last] * 3, record.final_hidden_normed, record.logits_at_pred, record.top1_token
            )
        if self.kind == "drifts" and self.calls > len(PROMPTS):
            logits = record.logits_at_pred * np.float32(1.001)
            record = PrefillRecord(record.layer_intermediates, np.empty(0), logits, record.top1_token)
        return record

    def decode_step(self, input_token: int, current_pos: int) -> DecodeStepRecord:
        return self.decode_step_probed(input_token, current_pos).record

    def decode_step_probed(self, input_token: int, current_pos: int) -> DecodeProbe:
        self.steps += 1
        keys, values = self.model.kv_cache()
        holes = self.kind == "hole" and self.steps > 1 and keys.shape[2] > 4
        if holes:
            holed = keys.copy(), values.copy()
            holed[0][:, :, 4], holed[1][:, :, 4] = 0, 0
            self.model.replace_cache(*holed)
        record, seen = self._decode(self._token(input_token), current_pos)
        if holes:
            self._put(slice(0, keys.shape[2]), keys, values)
        self._after()
        if self.kind == "nan" and self.steps == 3:
            logits = np.array(record.lm_head_logits)
            logits[5] = np.nan
            record = DecodeStepRecord(logits, record.top1_token)
        if self.kind == "rank" and self.steps == 2:
            record = DecodeStepRecord(-record.lm_head_logits, int((-record.lm_head_logits).argmax()))
        return DecodeProbe(record, [{"ffn_out": layer[0]} for layer in seen])

    def _token(self, token: int) -> int:
        return token - 7 if self.kind == "rare tokens" and token in (93, 94) else token

    def _after(self) -> None:
        keys, values = self.model.kv_cache()
        if self.kind == "scale":
            values = values.copy()
            values[:, :, -1] = (values[:, :, -1].astype(np.float32) * 1.04).astype(values.dtype)
        elif self.kind == "clobber" and keys.shape[2] > 4:
            keys = keys.copy()
            keys[1, 0, 2] = keys[1, 0, 3]
        elif self.kind == "swapped heads":
            keys = keys.copy()
            keys[2, :, -1] = keys[2, ::-1, -1]
        else:
            return
        self.model.replace_cache(keys, values)

    def _put(self, slots: slice, keys: Any, values: Any) -> None:
        now = [array.copy() for array in self.model.kv_cache()]
        now[0][:, :, slots], now[1][:, :, slots] = keys, values
        self.model.replace_cache(*now)

    def kv_cache(self) -> tuple[Any, Any]:
        """Padded to the length of a device's cache."""
        result = []
        for array in self.model.kv_cache():
            padded = np.zeros((*array.shape[:2], MAX_SEQ, array.shape[3]), array.dtype)
            padded[:, :, : array.shape[2]] = array
            result.append(padded)
        return result[0], result[1]


class Subject:
    """What the ladder needs of a deployment."""

    name = "played"
    tokenizer = Tokenizer()
    cache: ReferenceCache | None = None
    on_device = Deployment.on_device
    once = Deployment.once

    def __init__(self, checkpoint: Checkpoint, runner: Any) -> None:
        self.checkpoint = self.reference_checkpoint = checkpoint
        self._runner = runner
        self._kept: dict[Any, Any] = {}
        self.events: list[str] = []

    def runner(self, max_seq: int) -> Any:
        self.events.append("runner")
        return self._runner

    def release_runners(self) -> None:
        self.events.append("released")

    def matched_reference(self, *, reorder: int | None = None) -> MatchedReference:
        return MatchedReference(self.checkpoint, reorder=reorder, cache=self.cache)


@pytest.fixture(scope="module")
def device_model(checkpoint: Checkpoint) -> Any:
    from llms.verify.reference.hf import load_hf_model
    from llms.verify.reference.matched_model import MatchedModel

    return MatchedModel(load_hf_model(checkpoint), reorder=7)


@pytest.fixture(scope="module")
def hf(checkpoint: Checkpoint) -> HFReference:
    return HFReference(checkpoint)


def climb(checkpoint: Checkpoint, hf: HFReference, runner: Any) -> LadderOutcome:
    subject: Any = Subject(checkpoint, runner)
    return Ladder(subject, hf, PROMPTS, N_TOKENS, thresholds=FixedThresholds()).climb()


def test_a_clean_device_passes_every_rung(checkpoint: Checkpoint, hf: HFReference, device_model: Any) -> None:
    outcome = climb(checkpoint, hf, Full(device_model))
    assert outcome.ok, outcome.message
    assert {rung.status for rung in outcome.rungs} == {"passed"}
    assert json.loads(json.dumps(outcome.payloads, allow_nan=False)).keys() >= {
        "ladder",
        "cache_check",
        "layer_check",
        "edges",
    }
    assert [row["text"] for row in outcome.payloads["edges"]["prompts"]] == [
        "made-up tokens, 1",
        "made-up tokens, 16",
    ]
    heat = outcome.payloads["cache_check"]["prompts"][0]["value_min_cosine"]
    assert (len(heat), len(heat[0])) == (3, 2)
    tried = {row["length"] for row in outcome.payloads["limits"]["lengths"]}
    assert tried == {16, 17, 24}
    assert [refusal["length"] for refusal in outcome.payloads["limits"]["refusals"]] == [25, 24]


@pytest.mark.parametrize(
    ("kind", "rungs", "words"),
    [
        ("nan", {"teacher_forced", "layer_check", "plain_reference"}, "decode step 3 (token 'w"),
        ("rank", {"teacher_forced"}, "is not in the npu's top 5"),
        ("scale", {"cache_check", "layer_check"}, "norm ratio 1.04"),
        ("clobber", {"cache_check"}, "changed K of layer 1 head 0 slot 2 (prompt, token 'w5')"),
        ("swapped heads", {"cache_check", "layer_check"}, "layer 2 head"),
        ("hole", {"layer_check"}, "output of layer"),
        ("views", {"layer_check"}, "output of layer"),
        ("drifts", {"determinism"}, "repeated"),
        ("truncates", {"limits"}, "a prompt of 25 was answered"),
        ("rare tokens", {"edges"}, "layer 0 head"),
        ("one token", {"edges"}, "('made-up tokens, 1'), prefill"),
    ],
)
def test_a_fault_is_named(
    checkpoint: Checkpoint, hf: HFReference, device_model: Any, kind: str, rungs: set[str], words: str
) -> None:
    outcome = climb(checkpoint, hf, Full(device_model, kind))
    failed = {rung.name for rung in outcome.rungs if rung.status == "failed"}
    assert not outcome.ok
    assert rungs <= failed, outcome.message
    assert words in outcome.message
    assert json.dumps(outcome.payloads, allow_nan=False)
    if kind in ("rare tokens", "one token"):
        assert failed == {"edges"}, outcome.message
    if failed & {"teacher_forced", "cache_check", "layer_check"} and kind not in ("nan", "clobber", "rank"):
        assert "limit 0.0" in outcome.message
        assert "weakest fault it sees: some_fault" in outcome.message


@pytest.mark.parametrize(
    ("kind", "rung"), [("clean", None), ("scale", "cache_check"), ("hole", "layer_check")]
)
def test_a_checkpoint_nobody_measured(
    checkpoint: Checkpoint, hf: HFReference, device_model: Any, kind: str, rung: str | None, tmp_path: Path
) -> None:
    """Its limits come from a second implementation on the same prompts, and are kept."""
    subject: Any = Subject(checkpoint, Full(device_model, kind))
    subject.cache = ReferenceCache(tmp_path)
    outcome = Ladder(subject, hf, PROMPTS, N_TOKENS).climb()
    assert outcome.ok is (rung is None), outcome.message
    if rung is not None:
        assert outcome.rung(rung).status == "failed"
        assert "sums in another order" in outcome.rung(rung).message()
    kept = len(list(tmp_path.iterdir()))
    subject._runner = Full(device_model)
    again = Ladder(subject, hf, PROMPTS, N_TOKENS).climb()
    assert again.ok
    assert len(list(tmp_path.iterdir())) == kept

    def limits(of: LadderOutcome) -> dict[str, float | None]:
        return {one.statistic: one.limit for found in of.rungs for one in found.measured}

    assert limits(again) == limits(outcome), "no fault of the device moves them"


def test_what_is_not_offered_is_not_passed(
    checkpoint: Checkpoint, hf: HFReference, device_model: Any
) -> None:
    outcome = climb(checkpoint, hf, Plain(device_model))
    status = {rung.name: rung.status for rung in outcome.rungs}
    missing = {"teacher_forced", "cache_check", "layer_check", "edges", "limits"}
    assert {name for name, value in status.items() if value == "not offered"} == missing
    assert all(status[name] == "passed" for name in ("plain_reference", "self_consistency", "determinism"))
    assert "kv_cache" in outcome.rung("cache_check").reason
    assert "cache_check not offered" in outcome.message


def test_the_device_is_held_for_device_work_only(
    checkpoint: Checkpoint, hf: HFReference, device_model: Any
) -> None:
    subject: Any = Subject(checkpoint, Full(device_model))

    @contextmanager
    def lock() -> Iterator[None]:
        subject.events.append("held")
        yield
        subject.events.append("free")

    Ladder(subject, hf, PROMPTS[:1], 3, lock(), FixedThresholds()).climb()
    assert list(dict.fromkeys(subject.events)) == ["runner", "held", "released", "free"]


def test_a_device_that_fails_is_not_tried_by_the_test_of_every_rung(
    checkpoint: Checkpoint, hf: HFReference
) -> None:
    class Dead:
        """Fails in the first prefill."""

        name = "dead"
        tries = 0

        def prefill(self, prompt_tokens: Any) -> PrefillRecord:
            self.tries += 1
            raise OSError("the command timed out")

        def decode_step(self, input_token: int, current_pos: int) -> DecodeStepRecord:
            raise AssertionError("there is no KV cache")

    dead = Dead()
    subject: Any = Subject(checkpoint, dead)
    ladder = Ladder(subject, hf, PROMPTS, N_TOKENS, thresholds=FixedThresholds())
    for _ in range(13):
        with pytest.raises(OSError, match="the command timed out"):
            ladder.climb_once()
    assert dead.tries == 1
    with pytest.raises(OSError, match="the command timed out"):
        ladder.climb_once(retry=True)
    assert dead.tries == 2


@pytest.mark.parametrize("vocab_size", [1, 5, 96, 49152, 151936])
def test_made_up_tokens_reach_the_ends_of_the_vocabulary(vocab_size: int) -> None:
    from llms.verify.ladder.edges import edge_tokens

    tokens = edge_tokens(vocab_size, 144)
    assert len(tokens) == 144
    assert {0, vocab_size - 1} <= set(tokens) <= set(range(vocab_size))
    if vocab_size > 32768:
        assert {32767, 32768} <= set(tokens[:16])
        gaps = np.diff(sorted(set(tokens)))
        assert gaps.max() < vocab_size / 60


def test_no_prompts(checkpoint: Checkpoint, hf: HFReference) -> None:
    subject: Any = Subject(checkpoint, None)
    with pytest.raises(ValueError, match="at least one prompt"):
        Ladder(subject, hf, (), N_TOKENS, thresholds=FixedThresholds())


def test_the_worst_value_is_kept_and_nan_is_worst() -> None:
    judge = Judge("cache_check", FixedThresholds())
    for value in (0.001, float("nan"), 5.0):
        judge.see("key_cosine", value, f"at {value}")
    result = judge.result("")
    assert result.status == "failed"
    assert "key_cosine nan at at nan" in result.failures[0]
    assert result.measured[0].as_dict()["value"] is None


def test_limits_for_a_model_and_for_a_new_one(tmp_path: Any) -> None:
    def model(limit: float, label: str) -> dict[str, Any]:
        entry = {"limit": limit, "clean": {"max": limit / 2}, "weakest_fault": {"name": "f", "value": 1.0}}
        return {
            "checkpoint": label,
            "content_hash": label * 64,
            "device": "twin (modelled)",
            "date": "2026-01-01",
            "limits": {"a.b": entry},
        }

    file = tmp_path / "thresholds.json"

    def limit(name: str, content: str, kind: Any = "hub", path: str = "weights") -> Limit:
        checkpoint = Checkpoint(Path(path), "some", kind, content * 64)
        return Thresholds.for_checkpoint(name, checkpoint, file=file)["a.b"]

    models = {"x": model(0.1, "X"), "x/tiny": model(0.05, "T"), "y": model(0.4, "Y")}
    file.write_text(json.dumps({"format": 1, "models": models}))
    assert limit("x", "?").value == 0.1
    assert limit("x", "?", kind="tiny").value == 0.05
    assert limit("x", "?", path="llms/x/tiny").value == 0.05
    assert limit("x", "Y").value == 0.4, "the very checkpoint that was measured comes first"
    assert limit("y", "?", kind="tiny").value == 0.4
    loosest = limit("new", "?")
    assert loosest.value == 0.4
    assert loosest.text() == (
        "limit 0.4 (clean up to 0.2, weakest fault it sees: f 1; Y, twin (modelled), 2026-01-01)"
    )
    assert loosest.exceeded(0.41)
    assert loosest.exceeded(float("nan"))
    assert not loosest.exceeded(0.4)
    with pytest.raises(ThresholdError, match=r"tools\.thresholds"):
        Thresholds.for_checkpoint("x", Checkpoint(Path("w"), "some", "hub", "?"), file=file)["a.c"]
    with pytest.raises(ThresholdError, match="cannot be read"):
        load_file(tmp_path / "absent.json")
    file.write_text('{"format": 9}')
    with pytest.raises(ThresholdError, match="format"):
        load_file(file)


def test_limits_of_a_checkpoint_nobody_measured() -> None:
    """The value of the second implementation times a margin, or the floor; limits pool with consistency."""
    values = {
        "layer_check.decode_mean": 0.01,
        "layer_check.prefill_mean": 0.0,
        "teacher_forced.kl_max": 0.01,
        "self_consistency.kl_max": 0.05,
    }
    limits = calibrated(values, "a new model, second implementation")
    assert limits["layer_check.decode_mean"].value == pytest.approx(0.03)
    assert limits["layer_check.prefill_mean"].value == 2e-3
    assert limits["teacher_forced.kl_max"].value == pytest.approx(0.08)
    assert limits["limits.kl_max"].value == pytest.approx(0.15)
    text = limits["layer_check.decode_mean"].text()
    assert text == "limit 0.03 (clean up to 0.01; a new model, second implementation)"


def test_recorded_limits_belong_to_one_content() -> None:
    content = load_file()["models"]["qwen2/tiny"]["content_hash"]
    known = Thresholds.recorded(Checkpoint(Path("w"), "some", "hub", content))
    assert known is not None
    assert "tiny" in known["teacher_forced.kl_mean"].source
    assert Thresholds.recorded(Checkpoint(Path("w"), "some", "hub", "0" * 64)) is None
