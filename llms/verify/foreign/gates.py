"""The gates of adopted deployments (see `adopted.py`), one process each.

A habit that makes a verdict worthless fails its gate and is named; one that is harmless as long as something
else holds is a note. The habits are those of the examples of Xilinx/mlir-air e972f2942: records that are
views of a pooled buffer, a prompt length recounted as "tokens that are not end-of-text", layer outputs taken
from a second pass with other padding, prompts cut silently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from llms.verify.contract.capture import DiagnosisCapture
from llms.verify.contract.records import Array, PrefillRecord
from llms.verify.contract.topk import judge
from llms.verify.foreign.deployment import CONFIG_FIELDS, MAX_SEQ, Adopted, Answered, Verdict, trace_of
from llms.verify.gates.payloads import describe_failure, diagnosis_payload, topk_gate_payload
from llms.verify.gates.phase6.diagnosis import cosines, diagnose
from llms.verify.gates.phase6.gate import diagnosis_problems
from llms.verify.ladder.forced import ForcedCapture
from llms.verify.ladder.rungs import Pair, plain_reference
from llms.verify.ladder.thresholds import Thresholds

#: Cosine of two logit rows that are the same row, computed by one device in different programs.
SAME_ROW = 0.99


def contract(adopted: Adopted) -> Verdict:
    """Names and signatures of the contract, and the configuration against the checkpoint's own."""
    problems = list(adopted.description["problems"])
    notes: list[str] = []
    if not problems:
        text = (adopted.checkpoint.path / "config.json").read_text(encoding="utf-8")
        published = json.loads(text)
        heads = published.get("num_attention_heads")
        if heads and "head_dim" not in published:
            published["head_dim"] = published["hidden_size"] // heads
        for ours, theirs in CONFIG_FIELDS.items():
            stated, real = adopted.description["config"].get(ours), published.get(theirs)
            if stated is not None and real is not None and stated != real:
                problems.append(f"build_config() says {ours} = {stated}, the checkpoint {theirs} = {real}")
        if adopted.prompt_file is None:
            notes.append("no prompts of its own: our prompt set is used")
    return _verdict("adopted_contract", problems, notes, {"config": adopted.description.get("config", {})})


def records(adopted: Adopted) -> Verdict:
    """Records are copies of what happened, complete, finite, and of the production run."""
    prompt = adopted.prompts()[0]
    answer = adopted.inside
    index, seen = answer.job("inside")
    problems = [*_view_problems(seen), *_shape_problems(adopted, seen, len(prompt))]
    problems += [
        f"step {i} has logits that are not finite" for i, s in enumerate(seen["steps"]) if not s["finite"]
    ]
    problems += [
        f"step {i}: top1_token {s['token']} is not the argmax {s['topk'][0]} of its own logits"
        for i, s in enumerate(seen["steps"])
        if s["token"] != s["topk"][0]
    ]
    problems += _head_problems(adopted, answer, index)
    notes = _spy_notes(adopted, seen["spy"])
    return _verdict("adopted_records", problems, notes, {"shapes": seen["shapes"], "spy": seen["spy"]})


def consistency(adopted: Adopted) -> Verdict:
    """What needs no reference: state is reset, decode continues prefill, too long a prompt is refused."""
    prompts = adopted.prompts()
    first = list(prompts[0].ids)
    other = list(prompts[-1].ids) if len(prompts) > 1 else first[::-1]
    jobs: list[dict[str, Any]] = [
        {"name": "first", "ids": first, "n_tokens": 2, "keep_logits": True},
        {"name": "other", "ids": other, "n_tokens": 2, "keep_logits": True},
        {"name": "again", "ids": first, "n_tokens": 2, "keep_logits": True},
        {"name": "one more", "ids": first, "and_token_of": "first", "n_tokens": 1, "keep_logits": True},
        {
            "name": "too long",
            "ids": (first * (MAX_SEQ // len(first) + 1))[: MAX_SEQ + 1],
            "n_tokens": 1,
            "must_fail": True,
        },
    ]
    answer = adopted.capture(jobs, lite_mode=True)
    problems = []
    if not np.array_equal(answer.arrays["0/logits"], answer.arrays["2/logits"]):
        problems.append("the same prompt gives other logits after another one: per-prompt state is not reset")
    decoded, prefilled = answer.arrays["0/logits"][1], answer.arrays["3/logits"][0]
    cosine = float(cosines(decoded, prefilled))
    if not cosine >= SAME_ROW:
        problems.append(
            f"prefill of n+1 tokens and prefill of n plus one decode step disagree (cosine {cosine:.4f}, "
            f"limit {SAME_ROW}): look at decode positions, the KV cache and the prediction row"
        )
    notes = []
    refused = answer.job("too long")[1]["error"]
    if refused is None:
        notes.append(f"a prompt of {MAX_SEQ + 1} tokens is taken without an error: it is cut silently")
    payload = {"prefill_decode_cosine": cosine, "too_long": refused}
    return _verdict("adopted_consistency", problems, notes, payload)


def token_set(adopted: Adopted) -> Verdict:
    """The token-set gate, as for our own models."""
    settings, prompts = adopted.settings, adopted.prompts()
    jobs = [
        {"name": f"prompt {i}", "ids": list(p.ids), "n_tokens": settings.n_tokens}
        for i, p in enumerate(prompts)
    ]
    answer = adopted.capture(jobs, lite_mode=True)
    npu = [trace_of(p.ids, answer.job(f"prompt {i}")[1]["steps"]) for i, p in enumerate(prompts)]
    hf = adopted.reference([(f"prompt {i}", p.ids, settings.n_tokens) for i, p in enumerate(prompts)])
    result = judge(npu, [run.trace for run in hf], n_tokens=settings.n_tokens)
    payload = topk_gate_payload(result, [prompt.text for prompt in prompts], adopted.tokenizer)
    payload["pyxrt"] = answer.values["pyxrt"]
    return Verdict(result.ok, "topk_gate", payload, "" if result.ok else describe_failure(payload))


def continuation(adopted: Adopted) -> Verdict:
    """Both sides fed the reference's tokens: every step is compared, not only those up to a divergence.

    A decode fault behind an early harmless divergence and a common factor on the logits show here, which the
    token-set gate cannot see. The limit is the one against plain HF bf16: that of the checkpoint where it was
    measured, else the largest one measured.
    """
    settings, prompts = adopted.settings, adopted.prompts()
    hf = adopted.reference([(f"prompt {i}", p.ids, settings.n_tokens) for i, p in enumerate(prompts)])
    fed = [[step.token for step in run.trace.steps[:-1]] for run in hf]
    jobs: list[dict[str, Any]] = [
        {
            "name": f"prompt {i}",
            "ids": list(p.ids),
            "n_tokens": settings.n_tokens,
            "forced": fed[i],
            "keep_logits": True,
        }
        for i, p in enumerate(prompts)
    ]
    answer = adopted.capture(jobs, lite_mode=True)
    pairs = []
    for i, (prompt, run) in enumerate(zip(prompts, hf, strict=True)):
        index, seen = answer.job(f"prompt {i}")
        tokens = tuple(step["token"] for step in seen["steps"])
        npu = ForcedCapture(tuple(prompt.ids), tuple(fed[i]), tokens, answer.arrays[f"{index}/logits"])
        plain: Any = run.run or SimpleNamespace(logits=run.logits, keys=np.empty(0))
        pairs.append(Pair(i, prompt.text, npu, None, plain, adopted.tokenizer))
    limits = Thresholds.recorded(adopted.checkpoint) or Thresholds.for_model("")
    result = plain_reference(pairs, limits)
    return _verdict("adopted_continuation", list(result.failures), [], dict(result.data))


def end_of_text(adopted: Adopted) -> Verdict:
    """A prompt with end-of-text tokens inside, as chats have: from which row is predicted?"""
    eos = adopted.tokenizer.eos_token_id
    plain = [token for token in adopted.prompts()[0].ids if token != eos]
    middle = len(plain) // 2
    if eos is None or middle < 2:
        return _verdict("adopted_end_of_text", [], ["no end-of-text token, or too short a prompt"], {})
    ids = [*plain[:middle], eos, eos, *plain[middle:]]
    answer = adopted.capture(
        [{"name": "eos", "ids": ids, "n_tokens": 2, "keep_logits": True}], lite_mode=True
    )
    runs = adopted.reference(
        [(f"{n} tokens", ids[:n], 2 if n == len(ids) else 1) for n in range(len(ids), len(ids) - 3, -1)]
    )
    rows = answer.arrays["0/logits"]
    fits = [float(cosines(rows[0], np.asarray(run.logits[0], np.float32))) for run in runs]
    best = int(np.argmax(fits))
    problems = []
    if best:
        problems.append(
            f"a prompt of {len(ids)} tokens with 2 end-of-text tokens inside is predicted from position "
            f"{len(ids) - 1 - best} instead of {len(ids) - 1}: the prompt length is recounted as the number "
            "of tokens that differ from end-of-text. Chat templates that end a turn with it get a wrong row "
            "and wrong decode positions; pass the length on instead"
        )
    else:
        npu = trace_of(ids, answer.job("eos")[1]["steps"])
        result = judge([npu], [runs[0].trace], n_tokens=2)
        problems += result.reasons
    payload = {"tokens": len(ids), "cosine_by_rows_back": fits}
    return _verdict("adopted_end_of_text", problems, [], payload)


def diagnosis(adopted: Adopted) -> Verdict:
    """Cosine per layer against the reference, once the record shows the layers at all."""
    prompt = adopted.prompts()[0]
    answer = adopted.inside
    index, seen = answer.job("inside")
    problems = _view_problems(seen)
    (run,) = adopted.reference([("layers", prompt.ids, 1)])
    if run.run is None:
        return _verdict("adopted_diagnosis", problems, ["own reference model: no per-layer comparison"], {})
    layers = [{"ffn_out": _array(answer, index, f"layer {i}")} for i in range(seen["n_layers"])]
    record = PrefillRecord(
        [layer if layer["ffn_out"].size else {} for layer in layers],
        _array(answer, index, "final_hidden_normed"),
        _array(answer, index, "logits_at_pred"),
        seen["steps"][0]["token"],
    )
    found = diagnose(DiagnosisCapture(record, (), (), False), run.run)
    payload = diagnosis_payload(found, prompt.text)
    hidden = _not_offered(diagnosis_problems(found), seen["n_layers"] - 1)
    message = "\n".join([*problems, *([] if problems else hidden)])
    return Verdict(not message, "diagnosis", payload, message)


def _array(answer: Answered, index: int, name: str) -> Array:
    return answer.arrays.get(f"{index}/{name}", np.empty(0, np.float32))


def _not_offered(problems: Sequence[str], last: int) -> list[str]:
    """Without what the contract leaves out: layers of decode steps, the last layer before the final norm."""
    left_out = ("decode", f"prefill: layer {last} ffn_out is missing")
    return [problem for problem in problems if not problem.startswith(left_out)]


def _view_problems(seen: Mapping[str, Any]) -> list[str]:
    problems = []
    if seen["shared_memory"]:
        pairs = ", ".join(f"{a} and {b}" for a, b in seen["shared_memory"][:3])
        pairs += ", ..." if len(seen["shared_memory"]) > 3 else ""
        problems.append(
            f"layer_intermediates are views of one buffer ({pairs}): "
            "every entry shows the layer that ran last. Copy what is recorded: np.array(x, copy=True)"
        )
    for cause, names in seen["changed"].items():
        if names:
            problems.append(
                f"the prefill record changes when the runner goes on ({cause}): {', '.join(names[:4])}"
                f"{', ...' if len(names) > 4 else ''} are views of device buffers, not copies"
            )
    return problems


def _shape_problems(adopted: Adopted, seen: Mapping[str, Any], count: int) -> list[str]:
    config, shapes = adopted.description["config"], seen["shapes"]
    wanted = {f"layer {i}": [count, config["emb_dim"]] for i in range(config["n_layers"])}
    wanted["final_hidden_normed"] = [count, config["emb_dim"]]
    found = seen["n_layers"]
    problems = []
    if found != config["n_layers"]:
        problems.append(
            f"{found} entries in layer_intermediates, the configuration has {config['n_layers']} layers"
        )
    for name, shape in wanted.items():
        if name in shapes and shapes[name] != shape:
            problems.append(
                f"{name} has shape {shapes[name]}, the contract wants {shape}: real positions only"
            )
        elif name not in shapes and name != f"layer {config['n_layers'] - 1}":
            problems.append(f"{name} is missing")
    return problems


def _head_problems(adopted: Adopted, answer: Answered, index: int) -> list[str]:
    """The recorded hidden state must lead to the recorded logits through the checkpoint's own head."""
    hidden, logits = _array(answer, index, "final_hidden_normed"), _array(answer, index, "logits_at_pred")
    head = _lm_head(adopted.checkpoint.path)
    if head is None or not hidden.size or hidden.ndim != 2 or hidden.shape[1] != head.shape[1]:
        return []
    implied = head @ hidden[-1]
    size = min(implied.size, logits.size)
    cosine = float(cosines(implied[:size], logits[:size]))
    if cosine >= SAME_ROW:
        return []
    return [
        f"final_hidden_normed of the last position does not lead to logits_at_pred (cosine {cosine:.4f}, "
        f"limit {SAME_ROW}): the inside view is not that of the run that made the logits, or the row is "
        "another one"
    ]


def _lm_head(folder: Path) -> Array | None:
    from llms.checkpoints import CheckpointError, load_tensors, resolve

    try:
        tensors = load_tensors(resolve(str(folder), explicit=folder))
    except CheckpointError:
        return None
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if name in tensors:
            found: Array = np.asarray(tensors[name]).astype(np.float32)
            return found
    return None


def _spy_notes(adopted: Adopted, spy: Mapping[str, Any]) -> list[str]:
    notes = []
    repeated = {
        name: calls
        for name, calls in spy["after"].items()
        if calls == adopted.description["config"]["n_layers"]
    }
    if repeated:
        text = ", ".join(f"{name} {calls} times" for name, calls in sorted(repeated.items()))
        notes.append(
            f"the inside view comes from a second pass after the production prefill ({text}): it diagnoses "
            "that pass, not the run that was judged"
        )
    pads, others = set(spy["pads"]["production"]), set(spy["pads"]["after"])
    if pads and others and pads != others:
        notes.append(
            f"the second pass pads with token {sorted(others)}, production with {sorted(pads)}: equal only "
            "as long as attention is causal and padding reaches no real position"
        )
    return notes


def _verdict(kind: str, problems: list[str], notes: list[str], payload: dict[str, Any]) -> Verdict:
    content = {**payload, "problems": problems, "notes": notes}
    return Verdict(not problems, kind, content, "\n".join(problems), tuple(notes))


@dataclass(frozen=True)
class Gate:
    """A gate on adopted adapters: its name, its phase, and the function that judges."""

    name: str
    phase: int
    judge: Callable[[Adopted], Verdict]


GATES = (
    Gate("contract", 0, contract),
    Gate("records", 3, records),
    Gate("consistency", 3, consistency),
    Gate("topk_gate", 6, token_set),
    Gate("continuation", 6, continuation),
    Gate("end_of_text", 6, end_of_text),
    Gate("diagnosis", 6, diagnosis),
)
