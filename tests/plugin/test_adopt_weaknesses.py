"""The known weaknesses of the deployment contract, planted one at a time in the clean example adapter.

`blind` are gates of ours that pass in spite of it: the weakness of the contract's own verifier, which has the
token-set gate only.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from adoption import random_llama

from llms.verify.foreign.remote import RemoteAdapter, RemoteDeployment, RemoteSettings
from llms.verify.gates.phase6.gate import diagnosis_gate, topk_gate
from llms.verify.ladder.climbing import Ladder

EXAMPLE = Path(__file__).parents[1] / "silicon" / "adopted_example"
N_TOKENS = 10
WRAP = """

_prefill, _decode = Runner.prefill, Runner.decode_step
def prefill(self, prompt_tokens):
    record = _prefill(self, prompt_tokens)
    self.n = len(prompt_tokens)
    {prefill}
    return record
def decode_step(self, input_token, current_pos):
    record = _decode(self, input_token, current_pos)
    step, row = current_pos - self.n + 1, record.lm_head_logits
    {decode}
    return record
Runner.prefill, Runner.decode_step = prefill, decode_step
"""
# The second largest logit wins by a hair, as one more rounding can make it; three steps later all is noise.
HIDDEN_FAULT = (
    "order = np.argsort(row)\n"
    "    if step == 2: row[order[-2]] = row[order[-1]] * 1.0001 + 1e-4; record.top1_token = int(order[-2])\n"
    "    if step >= 5: row[:] = row[::-1].copy(); record.top1_token = int(np.argmax(row))"
)


@dataclass(frozen=True)
class Weakness:
    """Code for the two methods, the gate that must fail and its words, gates that see nothing."""

    gate: str
    says: str
    prefill: str = "pass"
    decode: str = "pass"
    blind: tuple[str, ...] = ()


WEAKNESSES = {
    "a scale error of the logits is invisible to the token-set gate": Weakness(
        "plain_reference",
        "kl_mean .* limit",
        "record.logits_at_pred = record.logits_at_pred * 2",
        "record.lm_head_logits = row * 2",
        blind=("topk_gate",),
    ),
    "nothing after the first divergence is looked at": Weakness(
        "plain_reference", "kl_max .* at prompt 0 .*decode step", decode=HIDDEN_FAULT, blind=("topk_gate",)
    ),
    "logits that are NaN pass": Weakness(
        "topk_gate", "not finite", decode="row[3:] = np.nan if step > 4 else row[3:]"
    ),
    "the chosen token is not the first of its own top k": Weakness(
        "topk_gate", "top-1|top1|own", decode="record.top1_token = int(np.argsort(row)[-2])"
    ),
    "layers that give nothing are skipped silently": Weakness(
        "diagnosis",
        "layer 1 ffn_out is missing",
        "record.layer_intermediates[1:2] = [{}] if not self.lite else []",
    ),
    "positions of padding are recorded": Weakness(
        "diagnosis",
        "prefill layer 0 ffn_out: shapes differ",
        "for l in record.layer_intermediates: l['ffn_out'] = np.concatenate([l['ffn_out']] * 2)",
    ),
    "decode carries state from the prompt before": Weakness(
        "determinism",
        "prefill: repeated, .* logits differ",
        "record.logits_at_pred = record.logits_at_pred * (1 + 1e-3 * getattr(self, 'runs', 0)); "
        "self.runs = getattr(self, 'runs', 0) + 1",
    ),
    "decode positions are off by one": Weakness(
        "self_consistency",
        "kl_max .* against a prefill of as many tokens: limit",
        decode="record = _decode(self, input_token, current_pos + 1)",
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.slow
@pytest.mark.parametrize("weakness", WEAKNESSES)
def test_a_weakness_is_caught_by(
    weakness: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = WEAKNESSES[weakness]
    monkeypatch.setenv("EXAMPLE_CHECKPOINT", str(checkpoint))
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path / "cache"))
    tree = Path(shutil.copytree(EXAMPLE / "llms", tmp_path / "llms"))
    adapter = tree / "second_llama" / "verify_adapter.py"
    adapter.write_text(adapter.read_text() + WRAP.format(prefill=plant.prefill, decode=plant.decode))
    deployment = RemoteDeployment(
        RemoteAdapter(adapter.parent, RemoteSettings(pyxrt="npu_twin.pyxrt")), use_cache=False
    )
    for name in plant.blind:
        ok, message = judged(name, deployment)
        assert ok, message
    ok, message = judged(plant.gate, deployment)
    assert not ok
    assert re.search(plant.says, message, re.DOTALL), message


def judged(gate: str, deployment: RemoteDeployment) -> tuple[bool, str]:
    """Verdict and text of a gate, or of a rung of the ladder."""
    prompts, reference = deployment.prompts(1), deployment.hf_reference()
    if gate == "topk_gate":
        outcome = topk_gate(deployment, reference, prompts, N_TOKENS)
        return outcome.ok, outcome.message
    if gate == "diagnosis":
        outcome = diagnosis_gate(deployment, reference, prompts[0])
        return outcome.ok, outcome.message
    rung = Ladder(deployment, reference, prompts, N_TOKENS).climb().rung(gate)
    return rung.ok, rung.message()
