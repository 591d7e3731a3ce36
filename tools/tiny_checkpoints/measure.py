"""How sure a checkpoint is: next-token loss, top-1 probability and logit margin on known and unknown text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.tiny_checkpoints.corpus import Corpus

_PASSAGES = 16
_PROMPTS = (
    "Explain in simple words why the sky is blue during the day.",
    "Tell me about the import statement.",
    "Write three tips for someone who is learning to cook.",
)
_NEW_TOKENS = 48


@dataclass(frozen=True)
class Sureness:
    """Means over all predicted positions of some text.

    Attributes:
        loss: cross entropy, nats per token.
        accuracy: share of positions whose top-1 token is the text's next one.
        top1: probability of the top-1 token.
        margin: top-1 logit minus top-2 logit.
    """

    loss: float
    accuracy: float
    top1: float
    margin: float


def sureness(model: Any, tokenizer: Any, texts: list[str]) -> Sureness:
    """Measure a causal model (any dtype; the softmax is f32) on texts, each from its own start."""
    import torch

    sums, count = [0.0] * 4, 0
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].float()
        target = ids[0, 1:]
        best = logits.topk(2).values
        sums[0] += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
        sums[1] += (logits.argmax(-1) == target).sum().item()
        sums[2] += logits.softmax(-1).max(-1).values.sum().item()
        sums[3] += (best[:, 0] - best[:, 1]).sum().item()
        count += len(target)
    return Sureness(*(total / count for total in sums))


def report(folder: Path, corpus: Corpus) -> list[str]:
    """Load a checkpoint in bf16 as anybody would and return lines with its figures and greedy answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.bfloat16).eval()
    known = [text[:900] for text in corpus.documents[:_PASSAGES]]
    lines = [f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.2f} MB"]
    for name, texts in (
        ("held-in", known),
        ("held-out", list(corpus.held_out[:: max(1, len(corpus.held_out) // _PASSAGES)])),
    ):
        figures = sureness(model, tokenizer, texts)
        lines.append(
            f"  {name:8} loss {figures.loss:.3f}, accuracy {figures.accuracy:.1%}, "
            f"mean top-1 probability {figures.top1:.3f}, mean margin {figures.margin:.2f}"
        )
    for prompt in _PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        with torch.no_grad():
            made = model.generate(ids, max_new_tokens=_NEW_TOKENS, do_sample=False)
            logits = model(made).logits[0].float()
        best = logits[ids.shape[1] - 1 : -1].topk(2).values
        margin = (best[:, 0] - best[:, 1]).mean().item()
        text = tokenizer.decode(made[0, ids.shape[1] :])
        lines.append(f"  {prompt!r} (mean margin {margin:.2f}): {text!r}")
    return lines
