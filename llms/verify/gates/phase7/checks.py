"""The questions of the audit, one function each; they add findings and raise nothing for a bad answer."""

from __future__ import annotations

import ast
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llms.verify.contract import topk
from llms.verify.contract.abilities.watch import ProductionCall, Watch
from llms.verify.contract.records import Array, DecodeStepRecord, PrefillRecord
from llms.verify.contract.topk import TokenStep, TokenTrace
from llms.verify.gates.phase6 import gate as gates
from llms.verify.gates.phase7.types import Audit, DeviceClock

if TYPE_CHECKING:
    from llms.checkpoints import Checkpoint
    from llms.verify.contract.chat import EncodedPrompt
    from llms.verify.contract.deployment import Deployment
    from llms.verify.reference.hf import HFReference, ReferenceRun


# The gate as it is published; written here again, so that a changed constant elsewhere shows.
GATE_K, GATE_TOKENS = 5, 32
STEPS = 6
MADE_UP_TOKENS = 19
# Times of the published models are predicted within 11 % (npu_twin.timing). The prediction is that of the
# deployment's own loop, which a clean twin follows to about 1 %. A factor of two leaves room for silicon and
# a busy host.
TIME_FACTOR = 2.0
# Peak of the memory that an NPU2 shares with its CPU: 128 bit LPDDR5X at 8000 MT/s. No decode step reads its
# weights faster.
BYTES_PER_SECOND = 128e9
# One model in one process gives the same bits: all logits are equal on four tiny models and SmolLM2-135M. In
# float32, rounded to bf16 at the end, 5 to 43 % of them are.
EQUAL_LOGITS = 0.95
FAULTS = ("norm_plus_one", "layer_skipped", "nan_at_step_3")
"""Faults of the catalogue that the audit plants. All are in the host's code, so silicon has them too."""


@dataclass(frozen=True, eq=False)
class PromptRun:
    """One prompt through the runner, with what was called and started meanwhile."""

    ids: tuple[int, ...]
    logits: tuple[Array, ...]
    tokens: tuple[int, ...]
    calls: tuple[ProductionCall, ...]
    started: int
    ttft_s: float
    tpot_s: float


def run_prompt(
    runner: Any, ids: Sequence[int], watch: Watch, clock: DeviceClock, steps: int = STEPS
) -> PromptRun:
    """Prefill and greedy decode steps, counted and timed on the device clock."""
    now = clock.now
    watch.take()
    begin = now()
    record = PrefillRecord.copy_of(runner.prefill(np.asarray(ids, np.int64)))
    first = now()
    logits, tokens = [record.logits_at_pred], [record.top1_token]
    for step in range(steps - 1):
        found = DecodeStepRecord.copy_of(runner.decode_step(tokens[-1], len(ids) + step))
        logits.append(found.lm_head_logits)
        tokens.append(found.top1_token)
    last = now()
    calls, started = watch.take()
    return PromptRun(
        tuple(int(token) for token in ids),
        tuple(np.asarray(row).astype(np.float32) for row in logits),
        tuple(tokens),
        tuple(calls),
        sum(started.values()),
        first - begin,
        (last - first) / max(1, steps - 1),
    )


_THINGS = (
    "rivers",
    "clocks",
    "bread",
    "maps",
    "bees",
    "bridges",
    "winter",
    "trains",
    "music",
    "salt",
    "ink",
    "tides",
)
_PEOPLE = ("a child", "an engineer", "a new neighbour", "a pilot", "a cook", "a visitor")


def made_up_text() -> str:
    """A prompt in plain English that differs from audit to audit."""
    # Random token ids would be no text to judge by: of four such prompts through SmolLM2-135M on the clean
    # twin one left the top 5 of plain HF (likeliest tokens at 2 to 40 %, KL up to 1.0, against the matched
    # reference up to 5e-3).
    first, second = (secrets.choice(_THINGS) for _ in range(2))
    count, reader = secrets.randbelow(7) + 2, secrets.choice(_PEOPLE)
    return f"Write {count} sentences about {first} and {second} for {reader}."


def made_up(vocab: int) -> tuple[int, ...]:
    """Random token ids, other ones in every audit: a prompt that must be computed, as nobody has seen it."""
    return tuple(secrets.randbelow(min(vocab, 30000) - 10) + 5 for _ in range(MADE_UP_TOKENS))


# -- (a) production code -----------------------------------------------------------------------------------


def production_problems(ran: PromptRun, what: str, per_call: Any) -> list[str]:
    """Why a run did not go through the model's production functions (empty: it did)."""
    problems = []
    steps = len(ran.tokens)
    for name, wanted in (("run_npu_prefill", 1), ("run_npu_decode_step", steps - 1)):
        calls = [call for call in ran.calls if call.function == name]
        if len(calls) != wanted:
            problems.append(f"{what}: {name} was called {len(calls)} times for {steps} tokens, not {wanted}")
        if per_call is not None:
            odd = {call.started for call in calls} - {per_call[name]}
            if odd:
                problems.append(
                    f"{what}: a call of {name} started {sorted(odd)} programs on the device, the "
                    f"model's layers need {per_call[name]}"
                )
    if not ran.started:
        problems.append(f"{what}: no program was started on the device")
    returned = [call.result for call in ran.calls if call.function != "prepare_runtime"]
    for index, (token, row) in enumerate(zip(ran.tokens, ran.logits, strict=True)):
        answer = returned[index] if index < len(returned) else None
        if answer is None:
            break
        its_token, its_row = answer
        same = np.array_equal(np.asarray(its_row).astype(np.float32), row, equal_nan=True)
        if its_token != token or not same:
            problems.append(f"{what}: step {index} is not what the production function returned")
            break
    return problems


def check_production(
    audit: Audit, runner: Any, prompt: EncodedPrompt, config: Any, watch: Watch, clock: DeviceClock
) -> tuple[PromptRun, PromptRun] | None:
    """Known prompt, made-up prompt, known prompt again; returns the last two runs."""
    question = "Does the runner call the model's production functions, every time?"
    per_call = watch.programs_per_call(len(prompt))
    problems: list[str] = []
    try:
        first = run_prompt(runner, prompt.ids, watch, clock)
        other = run_prompt(runner, made_up(config.vocab_size), watch, clock)
        again = run_prompt(runner, prompt.ids, watch, clock)
    except Exception as error:
        audit.add("production", question, [f"the runner failed: {type(error).__name__}: {error}"], "")
        return None
    for what, ran in (("first run", first), ("made-up prompt", other), ("the same prompt again", again)):
        problems += production_problems(ran, what, per_call)
    for step, (a, b) in enumerate(zip(first.logits, again.logits, strict=True)):
        if a.tobytes() != b.tobytes():
            problems.append(f"the same prompt again gives other logits at step {step}")
            break
    if first.logits[0].tobytes() == other.logits[0].tobytes():
        problems.append("a made-up prompt has the logits of the first prompt")
    calls = sum(call.function != "prepare_runtime" for ran in (first, other, again) for call in ran.calls)
    started = first.started + other.started + again.started
    evidence = (
        f"{calls} calls of run_npu_prefill and run_npu_decode_step of {watch.name} for 3 prompts of "
        f"{len(first.tokens)} tokens; {started} programs started"
        + (
            f" ({per_call['run_npu_prefill']} per prefill, {per_call['run_npu_decode_step']} per decode step)"
            if per_call
            else ""
        )
    )
    audit.add("production", question, problems, evidence)
    audit.figures["programs_started"] = started
    return other, again


def check_product(audit: Audit, opened: Deployment, watch: Watch, ran: PromptRun) -> None:
    """What a user of the command line gets is what the gates judge."""
    question = "Does the product generate the tokens that the gates judge?"
    try:
        tokens = watch.generate(opened.checkpoint, opened.tokenizer, ran.ids, len(ran.tokens))
    except Exception as error:
        audit.add("product", question, [f"it fails: {type(error).__name__}: {error}"], "")
        return
    if tokens is None:
        audit.add("product", question, ["not offered: no kernel sequence"], "", warn=True)
        return
    problems = []
    if tokens != ran.tokens:
        problems.append(f"the product generates {list(tokens)}, the runner {list(ran.tokens)}")
    audit.add("product", question, problems, f"{len(tokens)} tokens of a made-up prompt are equal")


# -- (b) reference -----------------------------------------------------------------------------------------


def check_reference(
    audit: Audit, opened: Deployment, reference: HFReference, prompt: EncodedPrompt, watch: Watch
) -> None:
    """Hugging Face in bf16, from the very tensors that are deployed, without the device."""
    from llms.checkpoints import load_tensors

    question = "Is the reference Hugging Face in bf16 from the same checkpoint?"
    problems = []
    mine, theirs = opened.checkpoint, opened.reference_checkpoint
    if mine.content_hash != theirs.content_hash:
        problems.append(
            f"the reference has another checkpoint: {theirs.label}, content {theirs.content_hash[:12]}"
        )
    watch.take()
    try:
        run = reference.run(prompt.ids, 2)
        model = reference.runner._model
    except Exception as error:
        audit.add("reference", question, [f"it cannot run: {type(error).__name__}: {error}"], "")
        return
    calls, started = watch.take()
    if calls or started:
        problems.append(f"the reference started {sum(started.values())} programs on the device")
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    if dtypes != ["bfloat16"]:
        problems.append(f"its live parameters are {', '.join(dtypes)}, not bfloat16")
    if not type(model).__module__.startswith("transformers."):
        problems.append(
            f"its model class is {type(model).__module__}.{type(model).__name__}, not one of transformers"
        )
    other = _different_tensors(model, load_tensors(mine))
    if other:
        problems.append(f"{len(other)} tensors differ from the checkpoint's, first {other[0]}")
    problems += _independent_problems(mine.path, run, prompt)
    count = sum(1 for _ in model.parameters())
    audit.add(
        "reference",
        question,
        problems,
        f"{type(model).__name__} of transformers, {count} parameters, all {', '.join(dtypes)}; checkpoint "
        f"content {mine.content_hash[:12]}; logits equal those of a model that the audit loads by itself",
    )


def _different_tensors(model: Any, tensors: Any) -> list[str]:
    import torch

    state = model.state_dict()
    found = []
    for name in tensors:
        held = state.get(name)
        if held is None:
            if name != "lm_head.weight":
                found.append(name)
            continue
        array = np.asarray(tensors[name])
        wanted = torch.from_numpy(np.ascontiguousarray(array.astype(np.float32))).to(torch.bfloat16)
        if held.shape != wanted.shape or not torch.equal(held.detach().to(torch.bfloat16), wanted):
            found.append(name)
    return found


def _independent_problems(folder: Path, run: ReferenceRun, prompt: EncodedPrompt) -> list[str]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, local_files_only=True
    ).eval()
    with torch.inference_mode():
        row = (
            model(input_ids=torch.tensor([list(prompt.ids)]), logits_to_keep=1).logits[0, -1].float().numpy()
        )
    equal = float((row == np.asarray(run.logits[0]).astype(np.float32)).mean())
    if equal < EQUAL_LOGITS:
        return [
            f"{equal:.0%} of its logits are those of a bf16 model that the audit loads by itself, not all"
        ]
    return []


def judge_of_the_gate() -> Any:
    """The comparison as the gate's module has it now, whatever an adapter has put there."""
    return vars(gates)["judge"]


# -- (c) the comparison ------------------------------------------------------------------------------------


def _trace(tokens: Sequence[int], *, top: Sequence[int] | None = None, finite: bool = True) -> TokenTrace:
    steps = [
        TokenStep(
            token, tuple(top) if top and index == 2 else tuple(range(token, token + GATE_K)), finite, 1000
        )
        for index, token in enumerate(tokens)
    ]
    return TokenTrace((1, 2, 3), tuple(steps))


def check_judge(audit: Audit, folder: Path) -> None:
    """The comparison that the gate uses, on made-up traces whose verdict is known."""
    question = "Is the gate's comparison the published one, and can it fail?"
    same = list(range(10, 10 + GATE_TOKENS))
    hf = _trace(same)
    sixth = [*same[:2], same[2] + GATE_K, *same[3:]]
    fifth = [*same[:2], same[2] + GATE_K - 1, *same[3:]]
    near = (same[2] + GATE_K - 1, same[2], 900, 901, 902)
    cases: list[tuple[str, bool, list[TokenTrace], list[TokenTrace]]] = [
        ("equal tokens", True, [hf], [hf]),
        ("the fifth best token", True, [_trace(fifth, top=near)], [hf]),
        ("the sixth best token", False, [_trace(sixth)], [hf]),
        ("logits that are not finite", False, [_trace(same, finite=False)], [hf]),
        ("a token too few", False, [_trace(same[:-1])], [_trace(same[:-1])]),
        ("no prompts", False, [], []),
    ]
    problems = []
    for name, wanted, npu, reference in cases:
        try:
            got = judge_of_the_gate()(npu, reference).ok
        except Exception as error:
            problems.append(f"it raises for {name}: {error}")
            continue
        if got is not wanted:
            problems.append(f"it {'passes' if got else 'fails'} {name}")
    if (topk.K, topk.N_TOKENS) != (GATE_K, GATE_TOKENS):
        problems.append(f"k = {topk.K} and {topk.N_TOKENS} tokens are set, not {GATE_K} and {GATE_TOKENS}")
    problems += _source_problems(folder)
    audit.add(
        "judge", question, problems, f"{len(cases)} made-up traces judged, k = {GATE_K}, {GATE_TOKENS} tokens"
    )


def _source_problems(folder: Path) -> list[str]:
    """Calls of a gate in the model's own tests with another k or fewer tokens."""
    found = []
    for path in sorted(folder.glob("tests/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called not in ("topk_gate", "judge", "judge_prompt"):
                continue
            given = {item.arg: item.value for item in node.keywords}
            for name, right in (("k", GATE_K), ("n_tokens", GATE_TOKENS)):
                value = given.get(name)
                if isinstance(value, ast.Constant) and value.value != right:
                    found.append(
                        f"{path.name}, line {node.lineno}: {called} with {name} = {value.value!r}, not "
                        f"{right}"
                    )
    return found


def check_thresholds(audit: Audit, checkpoint: Checkpoint) -> None:
    """Every limit of the ladder stands between a clean device and the weakest fault that it must see."""
    from llms.verify.ladder.thresholds import ThresholdError, Thresholds

    question = "Do the ladder's limits stand between clean and faulty?"
    try:
        limits = Thresholds.recorded(checkpoint)
    except ThresholdError as error:
        audit.add("limits", question, [str(error)], "")
        return
    if limits is None:
        evidence = "no limits are recorded for this checkpoint: the ladder takes them from a second correct "
        audit.add("limits", question, [], evidence + "implementation of the same arithmetic")
        return
    problems = []
    for name in limits.statistics:
        limit = limits[name]
        if not limit.value >= limit.clean:
            problems.append(f"{name}: limit {limit.value:.3g} is below a clean {limit.clean:.3g}")
        if limit.weakest_fault is not None and not limit.value < limit.weakest_fault[1]:
            problems.append(f"{name}: limit {limit.value:.3g} lets {limit.weakest_fault[0]} pass")
    faults = {fault[0] for name in limits.statistics if (fault := limits[name].weakest_fault)}
    evidence = (
        f"{len(limits.statistics)} limits above what a clean device measured and below the weakest fault "
    )
    audit.add("limits", question, problems, f"{evidence}that each must see ({len(faults)} different ones)")


def check_integrity(audit: Audit, changed: Sequence[str], looked_at: int) -> None:
    """Nothing that judges, measures or computes was replaced, and nothing looks at who is watching."""
    question = "Is the judging, timing and computing code the one that this tree ships?"
    problems = [*changed[:5], *([f"and {len(changed) - 5} more"] if len(changed) > 5 else [])]
    evidence = f"{looked_at} functions, methods and constants compared before and after the model's code ran"
    audit.add("integrity", question, problems, evidence)


# -- (d) time ----------------------------------------------------------------------------------------------


def check_time(audit: Audit, ran: PromptRun, config: Any, watch: Watch) -> None:
    """Device time of a prefill and a decode step against prediction and against what memory allows."""
    question = "Is the time plausible for layers and tokens?"
    measured = {"prefill": ran.ttft_s * 1e3, "decode step": ran.tpot_s * 1e3}
    try:
        bucket = watch.compiled_length(len(ran.ids))
        predicted = watch.predicted_ms(len(ran.ids))
    except Exception as error:
        audit.add("time", question, [f"there is no prediction: {error}"], "")
        return
    problems = []
    for name, ms in measured.items():
        ratio = ms / predicted[name] if predicted[name] else float("inf")
        if not 1 / TIME_FACTOR <= ratio <= TIME_FACTOR:
            problems.append(f"a {name} takes {ms:.2f} ms, {predicted[name]:.2f} ms are predicted")
    width = config.emb_dim * (2 * config.q_dim + 2 * config.kv_dim + 3 * config.hidden_dim)
    nbytes = 2 * (config.n_layers * width + config.vocab_size * config.emb_dim)
    least = nbytes / BYTES_PER_SECOND * 1e3
    if measured["decode step"] < least:
        problems.append(
            f"a decode step takes {measured['decode step']:.3f} ms, reading its weights takes {least:.3f} ms"
        )
    evidence = ", ".join(
        f"{name} {ms:.2f} ms (predicted {predicted[name]:.2f})" for name, ms in measured.items()
    )
    audit.add(
        "time",
        question,
        problems,
        f"{evidence}; {config.n_layers} layers, {bucket} rows; at least {least:.3f} ms",
    )
    audit.figures.update(
        ttft_ms=measured["prefill"],
        tpot_ms=measured["decode step"],
        predicted_ttft_ms=predicted["prefill"],
        predicted_tpot_ms=predicted["decode step"],
        prompt_rows=bucket,
    )
