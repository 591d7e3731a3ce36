"""Habits of foreign deployments that the common gates cannot see through the contract.

They are those of the examples of Xilinx/mlir-air e972f2942: records that are views of a pooled buffer, a
prompt length recounted as "tokens that are not end-of-text", layer outputs taken from a second pass with
other padding, prompts cut silently. A habit that makes a verdict worthless fails its gate and is named; one
that is harmless as long as something else holds is a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llms.verify.contract.capture import capture
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import MAX_SEQ, NO_DEVICE, Device
from llms.verify.contract.outcome import Outcome
from llms.verify.contract.topk import judge
from llms.verify.foreign.process import RemoteError
from llms.verify.foreign.remote import RemoteAdapter, RemoteDeployment, RemoteRunner
from llms.verify.gates.phase6.diagnosis import cosines
from llms.verify.reference.hf import HFReference


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
    """The record of a prefill is a copy; what it holds is judged by the block gate and the diagnosis.

    Notes: a second pass for the inside view, a prompt past the compiled length that is taken.
    Payload: ``spy``, ``too_long`` (the error, None when there is none), ``pyxrt``.
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
    notes = _second_pass(watched["spy"], deployment.config().n_layers)
    if too_long is None:
        notes.append(f"a prompt of {MAX_SEQ + 1} tokens is taken without an error: it is cut silently")
    payload = {"spy": watched["spy"], "too_long": too_long, "pyxrt": ended and ended.pyxrt}
    return _outcome("adopted_records", _view_problems(changed), payload, notes)


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


def _view_problems(changed: Mapping[str, Sequence[str]]) -> list[str]:
    return [
        f"the prefill record changes when the runner goes on ({cause}): {', '.join(names[:4])}"
        f"{', ...' if len(names) > 4 else ''} are views of device buffers, not copies. Copy what is "
        "recorded: np.array(x, copy=True)"
        for cause, names in changed.items()
        if names
    ]


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
