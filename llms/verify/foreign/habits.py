"""Habits of foreign deployments that the common gates cannot see through the contract.

They are those of the examples of Xilinx/mlir-air e972f2942: records that are views of a pooled buffer, a
prompt length recounted as "tokens that are not end-of-text", layer outputs taken from a second pass with
other padding, prompts cut silently. A habit that makes a verdict worthless fails its gate and is named; one
that is harmless as long as something else holds is a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llms.checkpoints import CheckpointError, load_tensors, resolve
from llms.verify.contract.capture import capture
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import MAX_SEQ, NO_DEVICE, Device
from llms.verify.contract.outcome import Outcome
from llms.verify.contract.records import Array, PrefillRecord
from llms.verify.contract.topk import judge
from llms.verify.foreign.process import RemoteError
from llms.verify.foreign.remote import RemoteAdapter, RemoteDeployment, RemoteRunner
from llms.verify.gates.phase6.diagnosis import cosines
from llms.verify.reference.hf import HFReference

#: Cosine of two logit rows that are the same row, computed by one device in different programs.
SAME_ROW = 0.99


def contract(adapter: RemoteAdapter) -> Outcome:
    """Names, signatures and fields of the contract; payload ``config``, ``problems``, ``notes``.

    Raises RemoteError when the adapter cannot even be asked.
    """
    problems = list(adapter.described["problems"])
    notes = []
    if not any(adapter.prompt_file(style) for style in ("instruct", "base")):
        notes.append("no prompts of its own: our prompt set is used")
    return _outcome("adopted_contract", problems, {"config": adapter.described.get("config", {})}, notes)


def records(deployment: RemoteDeployment, prompt: EncodedPrompt, *, device: Device = NO_DEVICE) -> Outcome:
    """The record of a prefill is a copy of what happened, complete, and of the run that made the logits.

    Notes: a second pass for the inside view, a prompt past the compiled length that is taken.
    Payload: ``shapes`` by name, ``spy``, ``too_long`` (the error, None when there is none), ``pyxrt``.
    """
    ids = np.array(prompt.ids, np.int64)
    with deployment.on_device(device) as runner:
        assert isinstance(runner, RemoteRunner)
        record, watched = runner.prefill_watched(ids)
        runner.decode_step(record.top1_token, len(ids))
        changed = {"decode_step": runner.changed()}
        runner.prefill(ids[::-1])
        changed["prefill"] = runner.changed()
        too_long = _too_long(runner, prompt.ids)
        ended = runner.close()
    config = deployment.config()
    problems = [*view_problems(watched["shared_memory"], changed), *_shape_problems(config, record, len(ids))]
    problems += head_problems(record, deployment.reference_checkpoint.path)
    notes = _second_pass(watched["spy"], config.n_layers)
    if too_long is None:
        notes.append(f"a prompt of {MAX_SEQ + 1} tokens is taken without an error: it is cut silently")
    shapes = {name: list(array.shape) for name, array in _named(record).items()}
    payload = {"shapes": shapes, "spy": watched["spy"], "too_long": too_long, "pyxrt": ended and ended.pyxrt}
    return _outcome("adopted_records", problems, payload, notes)


def end_of_text(
    deployment: RemoteDeployment,
    reference: HFReference,
    prompt: EncodedPrompt,
    *,
    device: Device = NO_DEVICE,
) -> Outcome:
    """A prompt with end-of-text tokens inside, as chats have: from which row is predicted?

    Payload: ``tokens`` (their number), ``cosine_by_rows_back`` (with the reference's prediction one row
    further back each).
    """
    eos = deployment.tokenizer.eos_token_id
    plain = [token for token in prompt.ids if token != eos]
    middle = len(plain) // 2
    if eos is None or middle < 2:
        return _outcome("adopted_end_of_text", [], {}, ["no end-of-text token, or too short a prompt"])
    ids = [*plain[:middle], eos, eos, *plain[middle:]]
    n = len(ids)
    runs = [reference.run(ids[: n - back], 1 if back else 2) for back in range(3)]
    reference.release()
    with deployment.on_device(device, runner=deployment.runner(lite_mode=True)) as runner:
        captured = capture(runner, ids, n_tokens=2, keep_logits=True)
    fits = [float(cosines(captured.logits[0], run.logits[0].astype(np.float32))) for run in runs]
    best = int(np.argmax(fits))
    problems: list[str] = []
    if best:
        problems.append(
            f"a prompt of {n} tokens with 2 end-of-text tokens inside is predicted from position "
            f"{n - 1 - best} instead of {n - 1}: the prompt length is recounted as the number of tokens "
            "that differ from end-of-text. Chat templates that end a turn with it get a wrong row and wrong "
            "decode positions; pass the length on instead"
        )
    else:
        problems += judge([captured.trace], [runs[0].trace()], n_tokens=2).reasons
    return _outcome("adopted_end_of_text", problems, {"tokens": n, "cosine_by_rows_back": fits}, ())


def _too_long(runner: RemoteRunner, ids: Sequence[int]) -> str | None:
    many = np.resize(np.array(ids, np.int64), MAX_SEQ + 1)
    try:
        runner.prefill(many)
    except RemoteError as error:
        return str(error).splitlines()[0]
    return None


def _named(record: PrefillRecord) -> dict[str, Array]:
    arrays = {f"layer {i}": layer.get("ffn_out") for i, layer in enumerate(record.layer_intermediates)}
    arrays["final_hidden_normed"] = record.final_hidden_normed
    return {name: array for name, array in arrays.items() if array is not None and array.size}


def view_problems(shared: Sequence[Sequence[str]], changed: Mapping[str, Sequence[str]]) -> list[str]:
    """Records that are views: pairs of layers in one memory, and by cause what changed afterwards."""
    problems = []
    if shared:
        pairs = ", ".join(f"{a} and {b}" for a, b in shared[:3]) + (", ..." if len(shared) > 3 else "")
        problems.append(
            f"layer_intermediates are views of one buffer ({pairs}): "
            "every entry shows the layer that ran last. Copy what is recorded: np.array(x, copy=True)"
        )
    for cause, names in changed.items():
        if names:
            problems.append(
                f"the prefill record changes when the runner goes on ({cause}): {', '.join(names[:4])}"
                f"{', ...' if len(names) > 4 else ''} are views of device buffers, not copies"
            )
    return problems


def _shape_problems(config: Any, record: PrefillRecord, count: int) -> list[str]:
    """The contract leaves out the last layer before the final norm; everything else is there."""
    given = len(record.layer_intermediates)
    problems = []
    if given != config.n_layers:
        problems.append(
            f"{given} entries in layer_intermediates, the configuration has {config.n_layers} layers"
        )
    arrays = _named(record)
    for name in (*(f"layer {i}" for i in range(config.n_layers)), "final_hidden_normed"):
        if name not in arrays and name != f"layer {config.n_layers - 1}":
            problems.append(f"{name} is missing")
        elif name in arrays and arrays[name].shape != (count, config.emb_dim):
            problems.append(
                f"{name} has shape {list(arrays[name].shape)}, the contract wants "
                f"{[count, config.emb_dim]}: real positions only"
            )
    return problems


def head_problems(record: PrefillRecord, checkpoint: Path) -> list[str]:
    """The recorded hidden state must lead to the recorded logits through the checkpoint's own head."""
    hidden, logits = record.final_hidden_normed, record.logits_at_pred
    head = _lm_head(checkpoint)
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
    try:
        tensors = load_tensors(resolve(str(folder), explicit=folder))
    except CheckpointError:
        return None
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if name in tensors:
            head: Array = np.asarray(tensors[name]).astype(np.float32)
            return head
    return None


def _second_pass(spy: Mapping[str, Any], n_layers: int) -> list[str]:
    notes = []
    repeated = {name: calls for name, calls in spy["after"].items() if calls == n_layers}
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


def _outcome(kind: str, problems: Sequence[str], payload: Mapping[str, Any], notes: Sequence[str]) -> Outcome:
    content = {**payload, "problems": list(problems), "notes": list(notes)}
    return Outcome.of(kind, kind.replace("_", " "), list(problems), content, notes)
