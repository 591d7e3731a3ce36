"""The token-set gate: its rule, and everything that must fail instead of pass."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llms.verify.contract.capture import capture
from llms.verify.contract.records import DecodeStepRecord, PrefillRecord
from llms.verify.contract.topk import TokenStep, TokenTrace, judge, judge_prompt, top_k

VOCAB = 64
N = 32


def step(token: int, *others: int, finite: bool = True, vocab: int = VOCAB) -> TokenStep:
    filler = [t for t in range(40, 60) if t not in (token, *others)]
    return TokenStep(token, (token, *others, *filler)[:5], finite, vocab)


def trace(tokens: list[TokenStep], prompt: tuple[int, ...] = (1, 2, 3)) -> TokenTrace:
    return TokenTrace(prompt, tuple(tokens))


def steps(n: int = N) -> list[TokenStep]:
    return [step(i % 30) for i in range(n)]


def test_equal_sequences_pass_without_divergence() -> None:
    verdict = judge_prompt(trace(steps()), trace(steps()))
    assert (verdict.status, verdict.divergence_step) == ("OK", None)


def test_divergence_inside_both_top_k_passes_and_ranks_are_one_based() -> None:
    npu, hf = steps(), steps()
    npu[7], hf[7] = step(33, 31, 34), step(34, 31, 35, 33)
    npu[8], hf[8] = step(3), step(4)  # after the first divergence nothing is comparable
    verdict = judge_prompt(trace(npu), trace(hf))
    assert (verdict.status, verdict.divergence_step) == ("OK", 7)
    assert (verdict.npu_rank_in_hf, verdict.hf_rank_in_npu) == (4, 3)


@pytest.mark.parametrize(
    ("npu_at", "hf_at", "says"),
    [
        (step(33), step(34, 33), "reference token 34 is not in the npu's top"),
        (step(33, 34), step(34), "npu token 33 is not in the reference's top"),
        (step(33), step(34), "npu token 33"),  # disjoint
    ],
)
def test_divergence_outside_a_top_k_fails(npu_at: TokenStep, hf_at: TokenStep, says: str) -> None:
    npu, hf = steps(), steps()
    npu[2], hf[2] = npu_at, hf_at
    verdict = judge_prompt(trace(npu), trace(hf))
    assert verdict.status == "FAIL"
    assert verdict.divergence_step == 2
    assert says in verdict.reason


def test_no_prompts_fail() -> None:
    result = judge([], [])
    assert not result.ok
    assert "no prompts" in result.reasons[0]


def test_a_missing_prompt_on_one_side_fails() -> None:
    assert not judge([trace(steps())], [trace(steps()), trace(steps())]).ok


@pytest.mark.parametrize("count", [0, 3, 31, 33])
@pytest.mark.parametrize("side", ["npu", "hf", "both"])
def test_cut_or_empty_output_fails_even_when_both_sides_agree(count: int, side: str) -> None:
    npu = trace(steps(count if side in ("npu", "both") else N))
    hf = trace(steps(count if side in ("hf", "both") else N))
    verdict = judge_prompt(npu, hf)
    assert verdict.status == "FAIL"
    assert f"{count} steps, the gate needs all 32" in verdict.reason


@pytest.mark.parametrize("side", [0, 1])
def test_logits_that_are_not_finite_fail_even_behind_a_harmless_divergence(side: int) -> None:
    both = [steps(), steps()]
    both[0][1], both[1][1] = step(33, 34), step(34, 33)
    both[side][3] = step(3, finite=False)
    verdict = judge_prompt(trace(both[0]), trace(both[1]))
    assert verdict.status == "FAIL"
    assert "step 3 has logits that are not finite" in verdict.reason


def test_own_top1_outside_own_top_k_fails() -> None:
    npu = steps()
    npu[5] = TokenStep(5, (20, 21, 22, 23, 24), True, VOCAB)
    verdict = judge_prompt(trace(npu), trace(steps()))
    assert verdict.status == "FAIL"
    assert "chose token 5, its own logits put 20 first" in verdict.reason


def test_own_top1_second_in_own_top_k_fails() -> None:
    npu = steps()
    npu[5] = TokenStep(5, (20, 5, 22, 23, 24), True, VOCAB)
    assert judge_prompt(trace(npu), trace(steps())).status == "FAIL"


def test_other_integrity_faults_fail() -> None:
    assert judge_prompt(trace(steps(), ()), trace(steps(), ())).status == "FAIL"
    other_prompt = judge_prompt(trace(steps(), (1, 2)), trace(steps(), (1, 3)))
    assert "position 1, 2 and 3" in other_prompt.reason
    short = steps()
    short[4] = TokenStep(4, (4, 9), True, VOCAB)
    assert "distinct top tokens" in judge_prompt(trace(short), trace(steps())).reason
    outside = [step(i % 30, vocab=20) for i in range(N)]
    assert "outside the vocabulary" in judge_prompt(trace(outside), trace(steps())).reason
    wide = [step(i % 30, vocab=VOCAB + 1) for i in range(N)]
    assert "different vocabularies" in judge_prompt(trace(wide), trace(steps())).reason


def test_one_bad_prompt_fails_the_gate_and_is_named() -> None:
    bad = steps()
    bad[0] = step(39)
    result = judge([trace(steps()), trace(bad)], [trace(steps()), trace(steps())])
    assert not result.ok
    assert result.reasons[0].startswith("prompt 1: ")


def test_ties_go_to_the_smaller_id() -> None:
    logits = np.array([1.0, 3.0, 3.0, 2.0, 3.0, 2.0, 2.0], ml_dtypes.bfloat16)
    assert top_k(logits, 5) == (1, 2, 4, 3, 5)


@given(st.lists(st.integers(-4, 4), min_size=5, max_size=80))
def test_top_k_equals_a_plain_sort(values: list[int]) -> None:
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:5]
    got = top_k(np.array(values, np.float32))
    assert list(got) == expected
    assert got[0] == int(np.argmax(values))


def test_nan_never_leads_a_top_k() -> None:
    logits = np.arange(8, dtype=np.float32)
    logits[7] = np.nan
    one = TokenStep.from_logits(7, logits)
    assert not one.finite
    assert one.topk[0] == 6


class Scripted:
    """A runner that says tokens of a script; ``nan_at`` puts one NaN into that step's logits."""

    name = "scripted"

    def __init__(self, tokens: list[int], nan_at: int | None = None) -> None:
        self.tokens, self.nan_at = tokens, nan_at
        self.fed: list[tuple[int, int]] = []

    def _row(self, index: int) -> np.ndarray:
        row = np.zeros(VOCAB, np.float32)
        row[self.tokens[index]] = 1.0
        if index == self.nan_at:
            row[63] = np.nan
        return row

    def prefill(self, prompt_tokens: np.ndarray) -> PrefillRecord:
        assert prompt_tokens.dtype == np.int64
        self.fed.clear()
        return PrefillRecord([], np.empty(0), self._row(0), self.tokens[0])

    def decode_step(self, input_token: int, current_pos: int) -> DecodeStepRecord:
        self.fed.append((input_token, current_pos))
        index = len(self.fed)
        return DecodeStepRecord(self._row(index), self.tokens[index])


def test_capture_feeds_own_tokens_from_the_position_behind_the_prompt() -> None:
    tokens = [(7 * i) % 60 for i in range(N)]
    tokens[2] = 2  # an end-of-text id does not stop the gate
    runner = Scripted(tokens)
    done = capture(runner, [5, 6, 7])
    assert done.trace.tokens == tuple(tokens)
    assert runner.fed == [(tokens[i], 3 + i) for i in range(N - 1)]


def test_capture_feeds_forced_tokens_and_keeps_logits() -> None:
    runner = Scripted(list(range(4)))
    done = capture(runner, [5], n_tokens=4, forced=[50, 51, 52], keep_logits=True)
    assert [token for token, _ in runner.fed] == [50, 51, 52]
    assert done.logits.shape == (4, VOCAB)
    with pytest.raises(ValueError, match="3 forced ones, got 1"):
        capture(runner, [5], n_tokens=4, forced=[1])
    with pytest.raises(ValueError, match="no tokens"):
        capture(runner, [])


def test_nan_at_step_three_of_a_runner_fails_the_gate() -> None:
    tokens = list(range(N))
    sick = capture(Scripted(tokens, nan_at=3), [1, 2]).trace
    result = judge([sick], [capture(Scripted(tokens), [1, 2]).trace])
    assert result.reasons == ("prompt 0: npu: step 3 has logits that are not finite",)
