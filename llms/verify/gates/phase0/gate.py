"""Phase 0: is this the right model? Weights, configuration, rotary angles, tokens and the reference itself.

Each check returns a :class:`llms.verify.contract.outcome.Outcome` with the payload ``phase0``::

    {"check": name, "status": "OK" | "FAIL", "problems": [text, ...], "notes": [text, ...], ...}

and, by check, `weights`: expected, loaded, assigned, unused (counts or names), redundant, shards (file,
tensors, bytes), index; `config`: fields (name, stated, built, ok) and forms; `rope`: kind, positions,
worst_of_limit (1 is the limit); `tokens`: prompts (text, n_tokens, style, ok), vocab_size, tokenizer_size;
`reference`: dtype, prompts (text, n_steps, distinct_tokens, entropy_of_uniform, margin, key).

What is expected comes from transformers and from the raw files, never from the code that is deployed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llms.verify.contract.abilities import offered
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import GENERATED, Deployment
from llms.verify.contract.outcome import Outcome
from llms.verify.contract.prompts import load_prompts
from llms.verify.contract.topk import N_TOKENS
from llms.verify.gates.phase0.config import config_read_back, read_json
from llms.verify.gates.phase0.weights import weight_ledger
from llms.verify.reference.hf import HFReference
from llms.verify.reference.hf_facts import expected_tensors, rotary_tables

PROMPTS = 2
# A vocabulary is padded beyond its tokenizer for the hardware's sake: by 399 at most among the published
# checkpoints of the families in scope (Qwen2.5-7B: 152064 against 151665).
LARGEST_PADDING = 1024
# Mean entropy of the next token as a share of a uniform distribution's. Untrained weights give 0.98 and more,
# SmolLM2-135M-Instruct about 0.15, the tiny checkpoints less. Above the first it is worth a note: untrained
# weights can still be deployed; above the second there is no preference to judge a deployment by.
NOTED_ENTROPY = 0.9
LARGEST_ENTROPY = 0.999
# Half a bf16 step of a cosine or sine, doubled for the last bit of the function itself.
_BF16_STEP = 2.0**-8
# Angles of the reference are float32: position times frequency is off by a few of its steps.
_F32_STEPS = 4 * 2.0**-24


def outcome(
    check: str, problems: Sequence[str], payload: Mapping[str, Any], notes: Sequence[str] = ()
) -> Outcome:
    """Verdict, payload and failure text of one check."""
    status = "FAIL" if problems else "OK"
    full = {"check": check, "status": status, "problems": list(problems), "notes": list(notes), **payload}
    return Outcome.of("phase0", f"phase 0, {check}", problems, full, notes)


def weights(deployment: Deployment, reference: HFReference, n_tokens: int = N_TOKENS) -> Outcome:
    """Every tensor that transformers expects is loaded and assigned, none is left over, shards agree."""
    folder = deployment.checkpoint.path
    ledger = None
    found: list[str] = []
    try:
        # Reading the weights of the deployment needs no device; a checkpoint it cannot read is a finding.
        read = offered(deployment.runner(1), "weight_ledger")
        ledger = read() if read is not None else None
    except Exception as error:  # whatever the adapter raises
        found = [f"the deployment cannot load its weights: {type(error).__name__}: {error}"]
        ledger = ((), (), {})
    finally:
        deployment.release_runners()
    problems, notes, payload = weight_ledger(folder, expected_tensors(folder), ledger)
    return outcome("weights", [*found, *problems], payload, notes)


def config(deployment: Deployment, reference: HFReference, n_tokens: int = N_TOKENS) -> Outcome:
    """Every field of the built configuration is what config.json says, in either form of transformers."""
    problems, notes, payload = config_read_back(deployment)
    return outcome("config", problems, payload, notes)


def rope(deployment: Deployment, reference: HFReference, n_tokens: int = N_TOKENS) -> Outcome:
    """The rotary table in use has the angles of transformers' own module, scaling included."""
    try:
        read = offered(deployment.runner(1), "rope_table")
        table = read() if read is not None else None
    finally:
        deployment.release_runners()
    kind, cosine, sine, angle = rotary_tables(deployment.reference_checkpoint.path, 2048)
    if table is None:
        return outcome("rope", (), {"kind": kind}, ["not offered: the runner has no rope_table"])
    problems = rope_problems(np.asarray(table), cosine, sine, angle)
    n, worst = min(len(table), len(cosine)), 0.0
    if table.shape[1] == 2 * cosine.shape[1]:
        wanted, limit = np.concatenate((cosine, sine), 1)[:n], np.concatenate((angle, angle), 1)[:n]
        worst = float((np.abs(table[:n] - wanted) / _limit(wanted, limit)).max())
    return outcome("rope", problems, {"kind": kind, "positions": n, "worst_of_limit": worst})


def _limit(reference: np.ndarray[Any, Any], angle: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    limit: np.ndarray[Any, Any] = _BF16_STEP * np.abs(reference) + _F32_STEPS * angle + 1e-6
    return limit


def rope_problems(
    table: np.ndarray[Any, Any],
    cosine: np.ndarray[Any, Any],
    sine: np.ndarray[Any, Any],
    angle: np.ndarray[Any, Any],
) -> list[str]:
    """Compare a table [positions, head_dim] of [cos | sin] with transformers' [positions, head_dim / 2]."""
    half = cosine.shape[1]
    if table.ndim != 2 or table.shape[1] != 2 * half:
        return [f"the table is {table.shape}, the model rotates {2 * half} columns"]
    n = min(len(table), len(cosine))
    for name, mine, theirs in (
        ("cosine", table[:n, :half], cosine[:n]),
        ("sine", table[:n, half:], sine[:n]),
    ):
        over = ~(np.abs(mine - theirs) <= _limit(theirs, angle[:n]))
        if over.any():
            position, pair = (int(i) for i in np.argwhere(over)[0])
            return [
                f"{name} of pair {pair} at position {position} is {mine[position, pair]:.6f}, transformers "
                f"has {theirs[position, pair]:.6f} ({int(over.sum())} of {over.size} differ): rope_theta or "
                "the frequency scaling is not the model's"
            ]
    return []


def tokens(deployment: Deployment, reference: HFReference, n_tokens: int = N_TOKENS) -> Outcome:
    """Token ids are those of the checkpoint's own tokenizer and chat template, each special token once."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(deployment.reference_checkpoint.path, local_files_only=True)
    problems: list[str] = []
    rows = []
    for prompt in deployment.prompts(PROMPTS):
        wrong = token_problems(prompt, own)
        problems += wrong
        rows.append({"text": prompt.text, "n_tokens": len(prompt), "style": prompt.style, "ok": not wrong})
    vocabulary = getattr(deployment.config(), "vocab_size", None)
    sizes = {"vocab_size": vocabulary, "tokenizer_size": len(own)}
    notes: list[str] = []
    if vocabulary is not None:
        wrong, notes = vocabulary_problems(own, int(vocabulary), deployment.checkpoint.path)
        problems += wrong
    room = deployment.prompt_room
    if room is not None and not {row["text"] for row in rows} <= set(load_prompts(deployment.prompt_style)):
        notes.append(
            f"prompts are cut to {room} tokens: the model's positions must hold "
            f"{GENERATED} generated ones too"
        )
    if len(deployment.tokenizer) != len(own):
        problems.append(
            f"the deployment uses a tokenizer of {len(deployment.tokenizer)} tokens, the checkpoint's own "
            f"has {len(own)}"
        )
    return outcome("tokens", problems, {"prompts": rows, **sizes}, notes)


def token_problems(prompt: EncodedPrompt, own: Any) -> list[str]:
    """Compare encoded ids with the text of the template, encoded without any further special token."""
    if prompt.style == "instruct":
        messages = [{"role": "user", "content": prompt.text}]
        text = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = own(text, add_special_tokens=False)["input_ids"]
    else:
        ids = own(prompt.text)["input_ids"]
    expected = tuple(int(token) for token in ids)
    begin = own.bos_token_id
    if begin is not None and list(prompt.ids[:2]) == [begin, begin]:
        return [f"{prompt.text!r}: the begin token {begin} stands twice"]
    if prompt.ids == expected:
        return []
    at = next(
        (i for i, (a, b) in enumerate(zip(prompt.ids, expected, strict=False)) if a != b),
        min(len(prompt.ids), len(expected)),
    )
    return [
        f"{prompt.text!r}: {len(prompt.ids)} tokens, the checkpoint's tokenizer gives {len(expected)}; first "
        f"difference at {at}: {list(prompt.ids[at : at + 4])} against {list(expected[at : at + 4])}"
    ]


def vocabulary_problems(tokenizer: Any, vocab_size: int, folder: Path) -> tuple[list[str], list[str]]:
    """Sizes and special tokens of a tokenizer against the embedding and against config.json.

    Returns problems and notes: published checkpoints exist whose embedding has far more rows than tokens, or
    whose files name different end tokens.
    """
    problems, notes = [], []
    size = len(tokenizer)
    if size > vocab_size:
        problems.append(f"the tokenizer has {size} tokens, the embedding {vocab_size} rows: another model's")
    elif vocab_size - size > LARGEST_PADDING:
        notes.append(
            f"the tokenizer has {size} tokens, the embedding {vocab_size} rows, more than padding explains"
        )
    stated, more = (read_json(folder / name) for name in ("config.json", "generation_config.json"))
    for name in ("bos_token_id", "eos_token_id"):
        ids: set[int] = set()
        for value in (stated.get(name), more.get(name)):
            ids |= set(value) if isinstance(value, list) else set() if value is None else {int(value)}
        mine = getattr(tokenizer, name)
        if ids and mine is not None and mine not in ids:
            notes.append(f"{name} of the tokenizer is {mine}, the checkpoint says {sorted(ids)}")
        problems += [f"{name} {one} is outside the vocabulary" for one in ids if not 0 <= one < vocab_size]
    return problems, notes


def reference_run(deployment: Deployment, reference: HFReference, n_tokens: int = N_TOKENS) -> Outcome:
    """The reference runs in bf16, everything finite, and what it says is no noise and no stuck token."""
    problems = [] if reference.dtype == "bfloat16" else [f"the reference runs in {reference.dtype}"]
    rows, notes, said = [], [], []
    for prompt in deployment.prompts(PROMPTS):
        run = reference.run(prompt.ids, n_tokens)
        parts = {
            "logits": run.logits,
            "layers": run.prefill_layers,
            "final norm": run.prefill_final,
            "decode layers": run.decode_layers,
            "keys": run.keys,
            "values": run.values,
        }
        wrong = [
            f"{name}: not finite" for name, a in parts.items() if not np.isfinite(a.astype(np.float32)).all()
        ]
        stats = text_statistics(run.logits.astype(np.float64), run.tokens)
        hopeless, odd = degeneracy(stats)
        problems += [f"{prompt.text!r}: {text}" for text in (*wrong, *hopeless)]
        notes += [f"{prompt.text!r}: {text}" for text in odd]
        said.append(run.logits[0].tobytes())
        rows.append({"text": prompt.text, **stats, "key": reference.key_hash(prompt.ids, n_tokens)})
    reference.release()
    if len(said) > 1 and len(set(said)) == 1:
        problems.append("every prompt gets the same logits: the reference does not read it")
    return outcome("reference", problems, {"dtype": reference.dtype, "prompts": rows}, notes)


def text_statistics(logits: np.ndarray[Any, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """Of logits [steps, vocab]: distinct tokens, mean entropy over that of a uniform choice, mean margin."""
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        entropy = -(np.exp(logs) * logs).sum(axis=1).mean() / np.log(logits.shape[1])
        two = np.partition(logits, logits.shape[1] - 2, axis=1)[:, -2:]
        margin = (two.max(axis=1) - two.min(axis=1)).mean()
    return {
        "n_steps": len(chosen),
        "distinct_tokens": len(set(chosen)),
        "entropy_of_uniform": float(entropy),
        "margin": float(margin),
    }


def degeneracy(stats: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return why a generation says nothing about a model, and what is merely odd about it.

    One token for ever is odd: small models with tied embeddings do repeat themselves. No preference between
    tokens is hopeless: nothing can be judged by it.
    """
    problems, notes = [], []
    if stats["n_steps"] > 4 and stats["distinct_tokens"] < 2:
        notes.append(f"all {stats['n_steps']} tokens are the same one: the reference repeats itself")
    share = f"entropy {stats['entropy_of_uniform']:.3f} of uniform"
    if not stats["entropy_of_uniform"] <= LARGEST_ENTROPY:
        problems.append(
            f"the reference is undecided ({share}, limit {LARGEST_ENTROPY}): wrongly loaded weights"
        )
    elif stats["entropy_of_uniform"] > NOTED_ENTROPY:
        notes.append(f"the reference is nearly undecided ({share}), as untrained weights are")
    if not stats["margin"] > 0:
        problems.append("the two best logits are equal at every step")
    return problems, notes


CHECKS: Mapping[str, Callable[..., Outcome]] = {
    "weights": weights,
    "config": config,
    "rope": rope,
    "tokens": tokens,
    "reference": reference_run,
}


def run(check: str, deployment: Deployment, reference: HFReference, n_tokens: int = N_TOKENS) -> Outcome:
    """Run one check of :data:`CHECKS` by name."""
    return CHECKS[check](deployment, reference, n_tokens)
