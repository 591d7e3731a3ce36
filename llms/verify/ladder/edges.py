"""What the prompts of a set do not reach: rare tokens, a prompt of one token, a full compiled length.

Prompts of a set use some hundred of many thousand tokens, are tens of tokens long and fill no compiled
length. Here made-up prompts go where they don't: one token whose decode steps are fed with ids from all over
the vocabulary, and as many such ids as the smallest compiled length holds. Both are judged as ``layer_check``
judges, layer by layer from the device's own inputs. An error in one row of a table, or one that begins at a
length, shows in the first layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llms.verify.contract.records import NpuRunner, ProbedRunner
from llms.verify.ladder.forced import CachedRunner, ForcedCapture, LimitedRunner, capture_forced
from llms.verify.ladder.layers import lacks, layers_of
from llms.verify.ladder.rungs import Pair
from llms.verify.ladder.thresholds import Thresholds
from llms.verify.ladder.types import Judge, RungResult, not_offered
from llms.verify.reference.arithmetic import DeviceArithmetic
from llms.verify.reference.matched import MatchedReference

STEPS = 16
# Runners that do not name their compiled lengths are given a prompt of this many tokens.
UNNAMED_LENGTH = 32


def edge_tokens(vocab_size: int, count: int) -> list[int]:
    """``count`` ids from all over a vocabulary: both ends, both sides of every power of two, then even steps.

    Tables are cut, padded and indexed at such places: partitions of an LM head, 16-bit indices, rows that a
    vocabulary was padded by.
    """
    ends = [vocab_size - 1, 0, vocab_size - 2, 1]
    powers = [1 << k for k in reversed(range(2, (vocab_size - 1).bit_length()))]
    sides = [token for power in powers for token in (power, power - 1)]
    sides += [vocab_size - 3 * power for power in (1, 2, 4, 8) if vocab_size > 3 * power]
    known = list(dict.fromkeys(token for token in (*ends, *sides) if 0 <= token < vocab_size))
    even = np.linspace(0, vocab_size - 1, max(2, count - len(known)))
    found = list(dict.fromkeys((*known, *(int(token) for token in even))))
    return [found[index % len(found)] for index in range(count)]


def capture_edges(runner: NpuRunner, vocab_size: int) -> tuple[ForcedCapture, ...]:
    """Run the made-up prompts on the device: one token with decode steps, and a full compiled length.

    Nothing for a runner that does not show its layers and its KV cache: there would be nothing to judge.
    """
    if not (isinstance(runner, CachedRunner) and isinstance(runner, ProbedRunner)):
        return ()
    lengths = runner.prompt_limits() if isinstance(runner, LimitedRunner) else ()
    length = lengths[0] if lengths else UNNAMED_LENGTH
    steps = min(STEPS, length - 1)
    ids = edge_tokens(vocab_size, length + steps + 1)
    one = capture_forced(runner, ids[:1], ids[1 : 1 + steps])
    return one, _full(runner, vocab_size, length, bool(lengths) and length < lengths[-1])


def full_lengths(runner: NpuRunner, vocab_size: int, lengths: Sequence[int]) -> tuple[ForcedCapture, ...]:
    """Fill every compiled length with a prompt; where there is room behind it, one decode step follows."""
    return tuple(_full(runner, vocab_size, length, length < lengths[-1]) for length in lengths)


def _full(runner: NpuRunner, vocab_size: int, length: int, room: bool) -> ForcedCapture:
    ids = edge_tokens(vocab_size, length + 1)[::-1]
    return capture_forced(runner, ids[:length], ids[length:] if room else ())


def edges(
    captures: Sequence[ForcedCapture],
    arithmetic: Callable[[int], DeviceArithmetic | None],
    reference: MatchedReference,
    tokenizer: Any,
    thresholds: Thresholds | None,
) -> RungResult:
    """Made-up prompts, layer by layer from the npu's own hidden states and KV cache.

    ``arithmetic``: what is deployed for a prompt length. Statistics as in ``layer_check``, with limits of
    their own: text without sense meets activations that prompts don't.

    Data: ``prompts``: [{index, text, prefill: [worst output error per layer], decode: likewise}].
    """
    judge = Judge("edges", thresholds)
    if not captures:
        return not_offered("edges", "kv_cache and decode_step_probed (cache and layers to look at)")
    pairs = [
        Pair(index, f"made-up tokens, {len(one.prompt_ids)}", one, None, None, tokenizer)
        for index, one in enumerate(captures)
    ]
    arithmetics = [arithmetic(len(one.prompt_ids)) for one in captures]
    missing = lacks(pairs, arithmetics)
    if missing:
        return not_offered("edges", missing)
    rows = [
        layers_of(judge, pair, how, reference.model) for pair, how in zip(pairs, arithmetics, strict=True)
    ]
    lengths = ", ".join(str(len(one.prompt_ids)) for one in captures)
    steps = sum(len(one.fed) for one in captures)
    return judge.result(
        f"prompts of {lengths} tokens from all over the vocabulary, {steps} decode steps",
        {"prompts": [row for row in rows if row is not None]},
    )
