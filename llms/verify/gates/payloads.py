"""What gates hand to reports: plain JSON-able dicts, with the token texts a reader needs.

The shapes are part of the event log of a run; a field may be added, none changes its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llms.verify.contract.topk import GateResult, PromptVerdict
from llms.verify.gates.phase6.diagnosis import Diagnosis


def token_text(tokenizer: Any, token: int | None) -> str | None:
    """Return the text of one token as a reader can see it (control characters escaped), None for None."""
    if token is None:
        return None
    try:
        text = str(tokenizer.decode([token]))
    except Exception:  # an id outside the vocabulary: libraries raise almost anything
        return f"<id {token}>"
    return text if text.isprintable() and text else repr(text)[1:-1] or f"<id {token}>"


def decode_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of a generation, special tokens shown; ids that cannot be decoded are spelled out."""
    try:
        return str(tokenizer.decode(list(tokens)))
    except Exception:
        return "".join(token_text(tokenizer, token) or "" for token in tokens)


def topk_gate_payload(result: GateResult, texts: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Build the payload ``topk_gate``.

    Args:
        result: outcome of :func:`llms.verify.contract.topk.judge`.
        texts: the prompt texts, in order.
        tokenizer: decodes tokens (the checkpoint's own).
    """
    prompts = []
    for index, verdict in enumerate(result.verdicts):
        text = texts[index] if index < len(texts) else ""
        prompts.append(_prompt_payload(index, text, verdict, tokenizer))
    return {
        "k": result.k,
        "n_tokens": result.n_tokens,
        "prompts": prompts,
        "status": "OK" if result.ok else "FAIL",
        "reasons": list(result.reasons),
    }


def _prompt_payload(index: int, text: str, verdict: PromptVerdict, tokenizer: Any) -> dict[str, Any]:
    step = verdict.divergence_step
    npu, hf = verdict.npu, verdict.hf
    sides: dict[str, Any] = {}
    for side, trace in (("npu", npu), ("hf", hf)):
        parted = trace.steps[step] if step is not None else None
        token = parted.token if parted else None
        sides[f"{side}_token"], sides[f"{side}_token_text"] = token, token_text(tokenizer, token)
        sides[f"{side}_topk"] = list(parted.topk) if parted else []
        sides[f"{side}_text"] = decode_text(tokenizer, trace.tokens)
    agreed = step if step is not None else min(len(npu.steps), len(hf.steps))
    return {
        "index": index,
        "text": text,
        "prompt_tokens": len(npu.prompt_ids),
        "n_steps": min(len(npu.steps), len(hf.steps)),
        "divergence_step": step,
        **sides,
        "npu_rank_in_hf": verdict.npu_rank_in_hf,
        "hf_rank_in_npu": verdict.hf_rank_in_npu,
        "agreed_prefix": decode_text(tokenizer, hf.tokens[:agreed]),
        "status": verdict.status,
        "reason": verdict.reason,
    }


def diagnosis_payload(diagnosis: Diagnosis, prompt: str) -> dict[str, Any]:
    """Build the payload ``diagnosis``; statistics that are not finite become None, as JSON has no NaN."""
    rows = [{name: _finite(value) for name, value in asdict(row).items()} for row in diagnosis.rows]
    return {
        "prompt": prompt,
        "rows": rows,
        "missing": [asdict(row) for row in diagnosis.missing],
        "problems": list(diagnosis.problems),
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_failure(payload: dict[str, Any]) -> str:
    """Return the text of a failed ``topk_gate`` payload for a terminal: both sides, token text included."""
    lines = [f"token-set gate {payload['status']} (k={payload['k']}, {payload['n_tokens']} tokens)"]
    lines += [f"  {reason}" for reason in payload["reasons"]]
    for prompt in payload["prompts"]:
        if prompt["status"] == "OK":
            continue
        lines += [
            f"prompt {prompt['index']} ({prompt['prompt_tokens']} tokens): {prompt['text']}",
            f"  {prompt['reason']}",
        ]
        if prompt["divergence_step"] is not None:
            lines += [
                f"  agreed: {prompt['agreed_prefix']!r}",
                f"  step {prompt['divergence_step']}:",
                _side("npu", prompt, "hf"),
                _side("hf", prompt, "npu"),
            ]
        lines += [f"  npu text: {prompt['npu_text']!r}", f"  hf text:  {prompt['hf_text']!r}"]
    return "\n".join(lines)


def _side(side: str, prompt: dict[str, Any], other: str) -> str:
    rank = prompt[f"{side}_rank_in_{other}"]
    where = f"rank {rank} in {other}" if rank is not None else f"not in the top of {other}"
    token, text = prompt[f"{side}_token"], prompt[f"{side}_token_text"]
    return f"    {side}: {token} {text!r}, {where}; own top {prompt[f'{side}_topk']}"
