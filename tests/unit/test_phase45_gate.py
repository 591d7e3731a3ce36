"""Phases 3 to 5: right steps are applied; steps that do nothing, cost time or precision, or err, fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llms.llama_kernel_builder import driver
from llms.llama_kernel_builder.deployment.forms import attention_layout, cascade_form
from llms.llama_kernel_builder.deployment.session import Session
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.resident import ResidentCache
from llms.llama_kernel_builder.specs import KernelSpec
from llms.verify.contract.abilities import NotOffered
from llms.verify.contract.abilities.forms import PRODUCTION, Dispatch
from llms.verify.contract.deployment import Deployment
from llms.verify.gates import measure, optimisation
from llms.verify.gates.optimisation import Step, Timed, judge_step
from llms.verify.gates.phase3.gate import baseline_gate
from llms.verify.gates.phase4.gate import prefill_gate
from llms.verify.gates.phase5.gate import decode_gate
from npu_twin import injection

LLMS = Path(__file__).resolve().parents[2] / "llms"
DRAIN = KernelSpec.make("gemm", {"M": 128, "K": 512, "N": 256}, "drain")
DIRECT = replace(DRAIN, method="direct")
ALONE = Dispatch((("a", "1", 4), ("b", "2", 4)), ((DRAIN, 8),), writes=8, reads=8)
JOINED = Dispatch((("ab", "3", 4),), ((DRAIN, 8),), writes=4, reads=4)


def step(before: Timed, after: Timed, **what: Any) -> Step:
    return Step("planted", before, after, topk_ok=what.pop("topk_ok", True), **what)


def test_a_step_that_works_is_applied_with_its_gain() -> None:
    judged = judge_step(step(Timed(10.0, ALONE), Timed(8.0, JOINED)))
    row = judged.payload
    assert (row["status"], row["reason"], row["problems"]) == ("applied", "20.0 % faster", [])
    assert (judged.ok, judged.message) == (True, "")
    assert (row["gain_ms"], row["gain_percent"]) == (2.0, 20.0)
    assert (row["before"]["elf_calls"], row["after"]["elf_calls"]) == (8, 4)


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        (step(Timed(10.0, ALONE), Timed(9.0, ALONE)), "changes nothing that is dispatched"),
        (step(Timed(10.0, ALONE), Timed(10.0, JOINED)), "makes nothing faster: 10.000 ms before, 10.000"),
        (step(Timed(10.0, ALONE), Timed(10.5, JOINED)), "makes nothing faster"),
        (step(Timed(10.0, ALONE), Timed(float("nan"), JOINED)), "makes nothing faster"),
        (
            step(Timed(10.0, ALONE), Timed(5.0, replace(JOINED, kernels=((DRAIN, 4), (DIRECT, 4))))),
            "buys speed with less exact kernels: gemm[M=128 K=512 N=256] direct",
        ),
        (
            step(Timed(10.0, ALONE), Timed(5.0, JOINED), topk_ok=False, topk_text="prompt 0: step 3"),
            "the token-set gate fails after it: prompt 0: step 3",
        ),
        (step(Timed(10.0, ALONE), Timed(5.0, JOINED), unequal="logits are not"), "logits are not"),
    ],
)
def test_a_step_that_fails_its_gate(planted: Step, says: str) -> None:
    judged = judge_step(planted)
    assert not judged.ok
    assert judged.payload["status"] == "FAIL"
    assert says in " ".join(judged.payload["problems"])
    assert judged.message.startswith("planted: ")
    undone = judge_step(replace(planted, deployed=False))
    assert undone.ok
    assert (undone.payload["status"], undone.payload["problems"]) == ("reverted", [])
    assert says in undone.payload["reason"]


def test_what_counts_as_less_exact() -> None:
    def cascade(k: int) -> KernelSpec:
        return KernelSpec.make("gemv_add", {"M": 512, "K": k}, "cascade")

    assert measure.rounds_inside(DIRECT)
    assert not measure.rounds_inside(replace(DIRECT, dtype_out="f32"))
    assert not measure.rounds_inside(DRAIN)
    assert measure.rounds_inside(cascade(1024))
    assert not measure.rounds_inside(cascade(512))
    # What was there before is no step's fault.
    low = replace(ALONE, kernels=((DIRECT, 8),))
    assert judge_step(step(Timed(9.0, low), Timed(8.0, replace(JOINED, kernels=((DIRECT, 8),))))).ok


def test_steps_that_are_not_possible_say_why() -> None:
    qwen3 = ModelConfig.from_hf_folder(LLMS / "qwen3_0_6b" / "tiny")
    llama = ModelConfig.from_hf_folder(LLMS / "llama32_1b" / "tiny")
    large = replace(llama, emb_dim=2048, n_heads=32, hidden_dim=8192)
    said = {
        "hangs beyond one chunk of 64": attention_layout(qwen3),
        "the only kernel for this head size": attention_layout(llama),
        "the host attends": attention_layout(replace(llama, head_dim=48)),
        "emb_dim 256, q_dim 256 is no multiple of 512": cascade_form(llama),
        "lower precision": cascade_form(large),
    }
    for text, (name, reason) in said.items():
        row = judge_step(Step(name, reason=reason)).payload
        assert row["status"] == "skipped"
        assert text in row["reason"]


def test_the_production_form_is_what_a_session_is_by_default() -> None:
    import inspect

    defaults = inspect.signature(Session.__init__).parameters
    form = PRODUCTION
    assert (defaults["merged"].default, defaults["resident"].default) == (form.merged, form.resident)


@pytest.fixture
def llama() -> Iterator[Deployment]:
    driver.select("twin")
    opened = Deployment.from_folder("llama32_1b", checkpoint=LLMS / "llama32_1b" / "tiny")
    yield opened
    opened.release_runners()


@pytest.fixture(scope="module")
def clean() -> Deployment:
    """Measured once, for the tests that plant nothing."""
    driver.select("twin")
    return Deployment.from_folder("qwen3_0_6b", checkpoint=LLMS / "qwen3_0_6b" / "tiny")


def baseline(deployment: Deployment) -> tuple[Any, dict[str, dict[str, Any]]]:
    outcomes = baseline_gate(deployment, deployment.hf_reference())
    return outcomes[-1], {outcome.kind: outcome.payload for outcome in outcomes}


def statuses(outcome: Any) -> dict[str, str]:
    return {item["name"].split(" (")[0]: item["status"] for item in outcome.payload["steps"]}


def test_baseline_and_both_phases_pass(clean: Deployment) -> None:
    reference = clean.hf_reference()
    outcome, payloads = baseline(clean)
    assert outcome.ok, outcome.message
    assert payloads["topk_gate"]["prompts"][0]["status"] == "OK"
    layers = {(row["path"], row["layer"]) for row in payloads["diagnosis"]["rows"]}
    assert layers == {(path, layer) for path in ("prefill", "decode") for layer in range(3)}
    prefill = prefill_gate(clean, reference)
    decode = decode_gate(clean, reference)
    for found in (prefill, decode):
        assert found.ok, found.message
        assert found.payload["gain_percent"] > 30
        merge = found.payload["steps"][0]
        assert (merge["name"], merge["equal"], merge["topk"]) == ("multi-launch merge", "bit for bit", "OK")
        assert merge["before"]["launches"] == merge["after"]["launches"]
        assert merge["before"]["elf_calls"] > 4 * merge["after"]["elf_calls"]
        json.dumps(found.payload)
    assert statuses(prefill) == {
        "multi-launch merge": "applied",
        "buffer reuse": "applied",
        "compiled length: the smallest that holds the prompt": "applied",
        "layout: attention without host transposes": "skipped",
    }
    reuse = prefill.payload["steps"][1]
    assert reuse["after"]["writes"] < reuse["before"]["writes"]
    assert reuse["after"]["elf_calls"] == reuse["before"]["elf_calls"]


def test_each_form_is_measured_once(clean: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = clean.hf_reference()
    first = measure.measured(clean, reference, PRODUCTION)
    monkeypatch.setattr(measure, "_measure", None)
    assert measure.measured(clean, reference, PRODUCTION) is first


def test_a_merge_that_is_not_called(llama: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merged programs are built and the old path still runs."""
    right = Session.__init__

    def start(self: Session, *args: Any, **options: Any) -> None:
        right(self, *args, **{**options, "merged": False})

    monkeypatch.setattr(Session, "__init__", start)
    outcome = decode_gate(llama, llama.hf_reference())
    assert statuses(outcome)["multi-launch merge"] == "FAIL"
    assert "multi-launch merge: it changes nothing that is dispatched" in outcome.message


def test_buffer_reuse_that_copies_all_the_same(llama: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    from llms.llama_kernel_builder.cache import KernelCache

    monkeypatch.setattr(ResidentCache, "_run", KernelCache._run)
    outcome = prefill_gate(llama, llama.hf_reference())
    assert statuses(outcome)["buffer reuse"] == "FAIL"
    assert "buffer reuse: it changes nothing that is dispatched" in outcome.message


def test_a_merged_program_that_is_slower(llama: Deployment) -> None:
    with injection.delay(20_000, kernel="o_gemv_ffn") as fault:
        outcome = decode_gate(llama, llama.hf_reference())
    assert fault.hits
    assert "multi-launch merge: it makes nothing faster" in outcome.message
    assert "decode takes" in outcome.message  # nor is production faster than the unfused baseline


def test_a_merged_program_that_computes_a_little_else(llama: Deployment) -> None:
    """One bit of one element in the merged form only: far below every token gate."""

    def flip(launch: Any, views: Any) -> None:
        if launch.name == "silu_mul":
            views["out"].u16[..., 7] ^= 1

    with injection.corrupt_launch(flip, kernel="o_gemv_ffn"):
        outcome = decode_gate(llama, llama.hf_reference())
    assert statuses(outcome)["multi-launch merge"] == "FAIL"
    assert "leaf kernels are the same, logits are not" in outcome.message


def test_a_merge_with_less_exact_kernels(llama: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMM `direct` in the merged programs: it compiles, and rounds its sum once per 32 columns."""
    from llms.llama_kernel_builder.block import Block

    right = Block.merged
    dims = {"M": 128, "K": 256, "N": 512}
    tile = {"tile_m": 64, "tile_k_l2": 256, "tile_k_l1": 32, "tile_n": 128}
    direct = KernelSpec.make("gemm", dims, "direct", tile, (2, 4))

    def merged(self: Block) -> Any:
        low = tuple(
            replace(item, spec=direct) if item.spec.dims == direct.dims else item for item in self.steps
        )
        return right(replace(self, steps=low))

    monkeypatch.setattr(Block, "merged", merged)
    outcome = prefill_gate(llama, llama.hf_reference())
    merge = outcome.payload["steps"][0]
    assert merge["status"] == "FAIL"
    assert merge["after"]["low_tier_launches"] > 0
    assert "buys speed with less exact kernels" in outcome.message


def test_a_baseline_that_is_wrong_is_no_baseline(llama: Deployment) -> None:
    def spoil(launch: Any, views: Any) -> None:
        if launch.op == "silu_mul":
            views["out"].u16[...] = 0

    with injection.corrupt_launch(spoil):
        outcome, _ = baseline(llama)
        after = decode_gate(llama, llama.hf_reference())
    assert not outcome.ok
    assert "token-set gate FAIL" in outcome.message
    assert "the unfused baseline fails the token-set gate" in after.message


def test_nan_in_a_layer_fails_phase_3(llama: Deployment) -> None:
    def nan(launch: Any, views: Any) -> None:
        if launch.op == "flash_attention":
            views["out"].u16[0, 3] = 0x7FC0

    with injection.corrupt_launch(nan):
        outcome, payloads = baseline(llama)
    assert any("values that are not finite" in text for text in outcome.payload["problems"])
    assert payloads["diagnosis"]["problems"]


def test_forms_with_other_kernels_have_a_stated_tolerance(clean: Deployment) -> None:
    base = measure.measured(clean, clean.hf_reference(), PRODUCTION)
    other = replace(base.prefill, dispatch=replace(base.prefill.dispatch, kernels=((DRAIN, 1),)))
    near = base.logits.copy()
    near.view(np.uint32)[0, 5] ^= 1 << 16  # the last bit of a bf16
    equal, wrong = optimisation.compare_logits(base, replace(base, prefill=other, logits=near))
    assert (equal.startswith("within 0.0"), wrong) == (True, "")
    far = base.logits.copy()
    far.view(np.uint32)[0, 5] ^= 0x4000_0000
    assert (
        "of the largest one, limit"
        in optimisation.compare_logits(base, replace(base, prefill=other, logits=far))[1]
    )


def test_a_runner_without_forms_is_not_offered(clean: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        """A runner of the bare contract."""

    monkeypatch.setattr(clean, "runner", lambda max_seq: Foreign())
    with pytest.raises(NotOffered, match=r"the runner has no forms\(\)"):
        measure.forms_of(clean)
