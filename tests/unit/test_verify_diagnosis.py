"""Diagnosis: a faithful device reads near 1 everywhere, a planted fault shows at its layer and path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llms.checkpoints import Checkpoint, load_tensors
from llms.verify.contract.capture import capture_diagnosis
from llms.verify.contract.records import DecodeProbe, DecodeStepRecord, PrefillRecord
from llms.verify.gates.payloads import diagnosis_payload
from llms.verify.gates.phase6.diagnosis import Diagnosis, cosines, diagnose
from llms.verify.reference.hf import HFReference, ReferenceRun

LAYERS, EMB, HEADS, KV, HIDDEN, VOCAB = 3, 32, 4, 2, 48, 96
DIM = EMB // HEADS
PROMPT = [3, 17, 5, 60, 22, 8]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=EMB,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        initializer_range=0.3,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return Checkpoint(folder, "tiny", "explicit", "c" * 64)


@pytest.fixture(scope="module")
def reference(tiny: Checkpoint) -> ReferenceRun:
    return HFReference(tiny).run(PROMPT, 9)


class NumpyLlama:
    """A Llama in plain float32 numpy, written for this test; faults are planted by arguments."""

    name = "numpy llama"

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        skip: int | None = None,
        skip_in_decode: int | None = None,
        shift: int = 0,
        pooled: bool = False,
        cut_layers: int = 0,
        nan_layer: int | None = None,
    ) -> None:
        self.weights = {k: v.astype(np.float32) for k, v in load_tensors(checkpoint).items()}
        self.skip, self.skip_in_decode, self.shift = skip, skip_in_decode, shift
        self.pooled, self.cut_layers, self.nan_layer = pooled, cut_layers, nan_layer

    def _norm(self, x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.weights[name]

    def _rope(self, x: Any, positions: Any) -> Any:
        angle = positions[:, None] / 10000.0 ** (np.arange(0, DIM, 2) / DIM)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        low, high = x[..., : DIM // 2], x[..., DIM // 2 :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def _run(self, tokens: list[int], start: int, skip: int | None) -> tuple[list[Any], Any, Any]:
        w = self.weights
        x = w["model.embed_tokens.weight"][tokens]
        positions = np.arange(start, start + len(tokens), dtype=np.float64)
        outputs = []
        for i in range(LAYERS):
            p = f"model.layers.{i}."
            if i != skip:
                h = self._norm(x, p + "input_layernorm.weight")
                q = (h @ w[p + "self_attn.q_proj.weight"].T).reshape(-1, HEADS, DIM)
                k = (h @ w[p + "self_attn.k_proj.weight"].T).reshape(-1, KV, DIM)
                v = (h @ w[p + "self_attn.v_proj.weight"].T).reshape(-1, KV, DIM)
                q, k = self._rope(q, positions), self._rope(k, positions)
                self.k[i] = np.concatenate([self.k[i], k])
                self.v[i] = np.concatenate([self.v[i], v])
                mixed = np.zeros_like(q)
                for row in range(len(tokens)):
                    upto = len(self.k[i]) - len(tokens) + row + 1
                    for head in range(HEADS):
                        keys = self.k[i][:upto, head * KV // HEADS]
                        score = np.exp(keys @ q[row, head] / np.sqrt(DIM))
                        mixed[row, head] = score @ self.v[i][:upto, head * KV // HEADS] / score.sum()
                x = x + mixed.reshape(len(tokens), -1) @ w[p + "self_attn.o_proj.weight"].T
                h = self._norm(x, p + "post_attention_layernorm.weight")
                gate = h @ w[p + "mlp.gate_proj.weight"].T
                up = h @ w[p + "mlp.up_proj.weight"].T
                x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
            if i == self.nan_layer:
                x = x.copy()
                x[-1, 0] = np.nan
            outputs.append(x)
        final = self._norm(x, "model.norm.weight")
        return outputs, final, final[-1] @ w["model.embed_tokens.weight"].T

    def prefill(self, prompt_tokens: Any) -> PrefillRecord:
        self.k = [np.zeros((0, KV, DIM))] * LAYERS
        self.v = [np.zeros((0, KV, DIM))] * LAYERS
        outputs, final, logits = self._run([int(t) for t in prompt_tokens], 0, self.skip)
        if self.pooled:
            outputs = [outputs[-1]] * LAYERS
        layers = [{"ffn_out": one} for one in outputs[: LAYERS - self.cut_layers]]
        return PrefillRecord(layers, final, logits, int(np.argmax(logits)))

    def decode_step_probed(self, input_token: int, current_pos: int) -> DecodeProbe:
        skip = self.skip if self.skip is not None else self.skip_in_decode
        outputs, final, logits = self._run([input_token], current_pos + self.shift, skip)
        layers = [{"ffn_out": one[0]} for one in outputs[: LAYERS - self.cut_layers]]
        return DecodeProbe(DecodeStepRecord(logits, int(np.argmax(logits))), layers, final[0])

    def decode_step(self, input_token: int, current_pos: int) -> DecodeStepRecord:
        return self.decode_step_probed(input_token, current_pos).record


def table(runner: Any, reference: ReferenceRun) -> Diagnosis:
    return diagnose(capture_diagnosis(runner, PROMPT, reference.fed), reference)


def test_a_faithful_device_is_near_one_in_every_layer_of_both_paths(
    tiny: Checkpoint, reference: ReferenceRun
) -> None:
    result = table(NumpyLlama(tiny), reference)
    assert result.missing == ()
    assert result.problems == ()
    places = {(row.path, row.layer, row.probe) for row in result.rows}
    assert len(places) == len(result.rows) == 2 * (LAYERS + 1)
    assert min(row.cos_min for row in result.rows) > 0.999
    assert (
        max(row.mean_abs for row in result.rows) > 0
    )  # bf16 against float32 is not a comparison with itself
    assert result.first_suspect("prefill") is result.first_suspect("decode") is None


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_skipped_layer_shows_at_that_layer_in_prefill_and_decode(
    tiny: Checkpoint, reference: ReferenceRun, layer: int
) -> None:
    result = table(NumpyLlama(tiny, skip=layer), reference)
    for path in ("prefill", "decode"):
        suspect = result.first_suspect(path)  # type: ignore[arg-type]
        assert suspect is not None
        assert suspect.layer == layer
        before = [row.cos_min for row in result.select(path) if row.layer < layer]  # type: ignore[arg-type]
        assert all(value > 0.999 for value in before)
    if layer:
        assert "did nothing" in result.problems[0]


def test_a_layer_skipped_in_decode_only_leaves_the_prefill_clean(
    tiny: Checkpoint, reference: ReferenceRun
) -> None:
    result = table(NumpyLlama(tiny, skip_in_decode=1), reference)
    assert result.first_suspect("prefill") is None
    suspect = result.first_suspect("decode")
    assert suspect is not None
    assert suspect.layer == 1


def test_a_decode_position_off_by_one_shows_in_decode_only(tiny: Checkpoint, reference: ReferenceRun) -> None:
    result = table(NumpyLlama(tiny, shift=1), reference)
    assert min(row.cos_min for row in result.select("prefill")) > 0.999
    assert min(row.cos_min for row in result.select("decode")) < 0.99


def test_records_that_are_views_of_one_buffer_are_a_problem(
    tiny: Checkpoint, reference: ReferenceRun
) -> None:
    result = table(NumpyLlama(tiny, pooled=True), reference)
    assert "views of a reused buffer" in result.problems[0]


def test_missing_layers_are_named_never_skipped(tiny: Checkpoint, reference: ReferenceRun) -> None:
    result = table(NumpyLlama(tiny, cut_layers=1), reference)
    assert [(one.layer, one.path) for one in result.missing] == [(2, "prefill"), (2, "decode")]
    assert len(result.rows) + len(result.missing) == 2 * (LAYERS + 1)


def test_a_runner_without_probes_is_not_offered_never_passed(
    tiny: Checkpoint, reference: ReferenceRun
) -> None:
    class Plain:
        name = "plain"

        def __init__(self) -> None:
            inner = NumpyLlama(tiny)
            self.prefill, self.decode_step = inner.prefill, inner.decode_step

    result = table(Plain(), reference)
    assert result.select("decode") == ()
    assert len(result.missing) == LAYERS + 1
    assert all("not offered" in one.reason for one in result.missing)


def test_values_that_are_not_finite_are_a_problem_and_stay_json(
    tiny: Checkpoint, reference: ReferenceRun
) -> None:
    result = table(NumpyLlama(tiny, nan_layer=1), reference)
    assert "prefill layer 1 ffn_out: values that are not finite" in result.problems
    suspect = result.first_suspect("prefill")
    assert suspect is not None
    assert suspect.layer == 1
    payload = diagnosis_payload(result, "a prompt")
    assert json.loads(json.dumps(payload, allow_nan=False)) == payload
    row = next(one for one in payload["rows"] if one["layer"] == 1 and one["path"] == "prefill")
    assert row["cos_min"] is None
    assert set(payload["rows"][0]) == {
        "layer",
        "path",
        "probe",
        *(f"cos_{name}" for name in ("min", "p5", "median", "mean")),
        *(f"{kind}_{what}" for kind in ("max", "mean") for what in ("abs", "rel")),
    }


def test_other_tokens_than_the_reference_are_refused(tiny: Checkpoint, reference: ReferenceRun) -> None:
    fed = [(token + 1) % VOCAB for token in reference.fed]
    with pytest.raises(ValueError, match="fed different tokens"):
        diagnose(capture_diagnosis(NumpyLlama(tiny), PROMPT, fed), reference)


def test_cosine_of_zero_counts_zero() -> None:
    a = np.array([[0.0, 0.0], [1.0, 0.0], [3.0, 4.0]])
    b = np.array([[1.0, 0.0], [0.0, 2.0], [6.0, 8.0]])
    np.testing.assert_allclose(cosines(a, b), [0, 0, 1])


def test_the_package_imports_without_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, llms.checkpoints, llms.verify.contract.deployment, llms.verify.gates.phase6.diagnosis;"
        "import llms.verify.gates.payloads;"
        "print([m for m in ('torch', 'transformers', 'gguf', 'huggingface_hub', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
