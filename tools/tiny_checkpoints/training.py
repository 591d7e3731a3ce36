"""Training of one tiny checkpoint: plain and chat batches, initial values that set traits, AdamW."""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.tiny_checkpoints.corpus import Corpus, Turn
from tools.tiny_checkpoints.families import Family, config_dict, generation_dict
from tools.tiny_checkpoints.tokenizer import save_tokenizer, train_tokenizer

WEIGHTS = "model.safetensors"
ROW_TOKENS = 256
ROWS = 3
PEAK_RATE, FINAL_RATE = 3e-3, 1e-4
WARM_UP_STEPS = 40
CHAT_SHARE = 0.5
_IGNORE = -100  # no target here


def build(family: Family, corpus: Corpus, out: Path, say: Callable[[str], None] = print) -> Path:
    """Train a tiny checkpoint and put its folder in place of ``out`` only when it is complete.

    Args:
        family: what to train.
        corpus: the text.
        out: folder to create; an existing one is replaced.
        say: receives progress lines.

    Returns:
        ``out``.
    """
    import torch
    from safetensors.torch import save
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # one thread per model: sums do not depend on how many cores there are
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(family.seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        staging.chmod(0o755)
        ids = save_tokenizer(train_tokenizer(family.tokenizer, corpus), family.tokenizer, staging)
        _write_json(staging / "config.json", config_dict(family, ids))
        _write_json(staging / "generation_config.json", generation_dict(family, ids))
        tokenizer = AutoTokenizer.from_pretrained(staging, local_files_only=True)
        config = AutoConfig.from_pretrained(staging, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        initialise(model, family)
        train(model, batches(tokenizer, corpus, family), family, say)
        state = model.state_dict()
        if family.tied:
            state.pop("lm_head.weight", None)
        tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in sorted(state.items())}
        metadata = {
            "format": "pt",
            "source": "trained from scratch by tools/tiny_checkpoints on pydoc_data.topics (PSF-2.0)",
            "corpus_sha256": corpus.sha256,
            "seed": str(family.seed),
        }
        (staging / WEIGHTS).write_bytes(with_metadata(save(tensors), metadata))
        if out.exists():
            shutil.rmtree(out)
        staging.replace(out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return out


def with_metadata(file: bytes, metadata: dict[str, str]) -> bytes:
    """Put metadata into the bytes of a safetensors file, in order: the library's own order is random."""
    (length,) = struct.unpack("<Q", file[:8])
    table = json.loads(file[8 : 8 + length])
    header = json.dumps({**table, "__metadata__": metadata}, sort_keys=True).encode()
    header += b" " * (-len(header) % 8)  # data starts at a multiple of 8, as the format asks
    return struct.pack("<Q", len(header)) + header + file[8 + length :]


def initialise(model: Any, family: Family) -> None:
    """Draw initial values such that every trait is there from the start and training adapts to it.

    Norm weights scatter around 1 by about a fifth; biases of Qwen2 have the size of the projections they are
    added to; QK-norm weights of Qwen3 lie around 1.6. None of them is decayed, so training moves but keeps
    them.
    """
    import torch

    generator = torch.Generator().manual_seed(family.seed)
    bias_scale = {"q_proj": 0.7, "k_proj": 1.5, "v_proj": 0.25}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            owner = name.split(".")[-2]
            if name.endswith(".bias"):
                parameter.copy_(bias_scale[owner] * draw)
            elif owner in ("q_norm", "k_norm"):
                parameter.copy_(1.6 * torch.exp(0.3 * draw))
            elif parameter.ndim == 1:
                parameter.copy_(torch.exp(0.2 * draw))
            elif owner in ("embed_tokens", "lm_head"):
                parameter.copy_(0.04 * draw)
            else:
                gain = 1 / math.sqrt(2 * family.layers) if owner in ("o_proj", "down_proj") else 1.0
                parameter.copy_(gain / math.sqrt(parameter.shape[1]) * draw)
    model.tie_weights()


def batches(tokenizer: Any, corpus: Corpus, family: Family) -> Iterator[tuple[Any, Any]]:
    """Yield tokens and targets, int64 [ROWS, ROW_TOKENS] each, without end: plain text and conversations.

    In conversations only the answers are targets; everything else is ``_IGNORE``.
    """
    import torch

    chooser = random.Random(family.seed)
    end = tokenizer.convert_tokens_to_ids(family.tokenizer.stop[-1])
    begin = [tokenizer.bos_token_id] if family.tokenizer.add_bos else []
    length = ROW_TOKENS + 1
    stream: list[int] = []
    for text in corpus.documents:  # verbose=False: longer than a context is fine here
        stream += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], end]
    turns = list(corpus.turns)
    queue: list[Turn] = []

    def ids(messages: list[dict[str, str]], opened: bool) -> list[int]:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=opened, return_dict=True)
        return list(encoded["input_ids"])

    def plain() -> tuple[list[int], list[int]]:
        start = chooser.randrange(len(stream) - length)
        row = [*begin, *stream[start : start + length]][:length]
        return row, row

    def chat() -> tuple[list[int], list[int]]:
        messages: list[dict[str, str]] = []
        row: list[int] = []
        targets: list[int] = []
        while len(row) < length:
            if not queue:
                queue.extend(chooser.sample(turns, len(turns)))
            turn = queue.pop()
            messages.append({"role": "user", "content": turn.question})
            opened = len(ids(messages, opened=True))
            messages.append({"role": "assistant", "content": turn.answer})
            row = ids(messages, opened=False)
            targets += [_IGNORE] * (opened - len(targets)) + row[opened:]
        return row[:length], targets[:length]

    while True:
        pairs = [chat() if chooser.random() < CHAT_SHARE else plain() for _ in range(ROWS)]
        tokens = torch.tensor([row[:-1] for row, _ in pairs], dtype=torch.int64)
        yield tokens, torch.tensor([targets[1:] for _, targets in pairs], dtype=torch.int64)


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: linear warm-up, then half a cosine down to the final rate."""
    if step < WARM_UP_STEPS:
        return PEAK_RATE * (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return FINAL_RATE + (PEAK_RATE - FINAL_RATE) * (1 + math.cos(math.pi * done)) / 2


def train(model: Any, source: Iterator[tuple[Any, Any]], family: Family, say: Callable[[str], None]) -> None:
    """Run ``family.steps`` steps of AdamW and say the loss now and then."""
    import torch

    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)
    model.train()
    started, recent = time.process_time(), []
    for step in range(family.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, family.steps)
        tokens, targets = next(source)
        logits = model(tokens, use_cache=False).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=_IGNORE)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        recent.append(loss.item())
        if (step + 1) % 100 == 0 or step + 1 == family.steps:
            mean = sum(recent) / len(recent)
            spent = time.process_time() - started
            say(f"{family.folder}: step {step + 1}/{family.steps}, loss {mean:.3f}, {spent:.0f} s CPU")
            recent.clear()
    model.eval()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
