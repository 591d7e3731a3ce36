"""The host's loop around the layers: what no kernel shows, looked at when every kernel agrees.

Prompts that follow on each other, and prompts past the limit. Prompt length and token selection of one prompt
are seen on the way (:mod:`llms.verify.localise.walk`, :func:`llms.verify.localise.find.find`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llms.verify.contract.records import Array
from llms.verify.localise.judge import LOOP, Row, relative

_, CACHE, IDS, LENGTH = LOOP
# Enough to use what the prefill left in the cache.
STEPS = 2


def look(runner: Any, ids: Sequence[int], other: Sequence[int], fed: Sequence[int]) -> Iterator[Row]:
    """Rows of the host's loop; `fed`: tokens of the decode steps behind `ids`; `other`: another prompt."""
    yield _cache_state(runner, ids, other, fed[:STEPS])
    yield _longest_prompt(runner, ids)


def _run(runner: Any, ids: Sequence[int], fed: Sequence[int]) -> tuple[list[Array], tuple[Array, Array]]:
    rows = [np.asarray(runner.prefill(np.asarray(ids, np.int64)).logits_at_pred).copy()]
    for step, token in enumerate(fed):
        found = runner.decode_step(int(token), len(ids) + step)
        rows.append(np.asarray(found.lm_head_logits).copy())
    keys, values = runner.kv_cache()
    end = len(ids) + len(fed)
    return rows, (np.asarray(keys)[:, :, :end].copy(), np.asarray(values)[:, :, :end].copy())


def _cache_state(runner: Any, ids: Sequence[int], other: Sequence[int], fed: Sequence[int]) -> Row:
    """A prompt behind another one must leave the cache that it leaves on its own."""
    _run(runner, ids, ())
    rows, cache = _run(runner, ids, fed)
    _run(runner, other, fed)
    again, now = _run(runner, ids, fed)
    problems = []
    for name, before, after in (("K", cache[0], now[0]), ("V", cache[1], now[1])):
        changed = (before != after).any(-1)
        if changed.any():
            layer, _, slot = (int(i) for i in np.argwhere(changed)[0])
            slots = sorted({int(i) for i in np.argwhere(changed)[:, 2]})
            problems.append(
                f"behind another prompt, {name} of layer {layer}, position {slot}, is not what the same "
                f"prompt left before ({len(slots)} positions differ: {_ranges(slots)})"
            )
    for step, (before, after) in enumerate(zip(rows, again, strict=True)):
        if not np.array_equal(before, after, equal_nan=True):
            what = "prefill" if step == 0 else f"decode step {step}"
            problems.append(f"the logits of its {what} differ by {relative(after, before):.1e}")
            break
    return Row("prefill", -1, 0, CACHE, "cache", "host", not problems, note="; ".join(problems))


def _longest_prompt(runner: Any, ids: Sequence[int]) -> Row:
    """A prompt past the limit must be refused: an answer means that it was cut."""
    limits_of = getattr(runner, "prompt_limits", None)
    if not callable(limits_of):
        return Row("prefill", -1, 0, IDS, "ids", "host", True)
    limit = max(limits_of())
    longer = [int(ids[i % len(ids)]) for i in range(limit + 1)]
    try:
        runner.prefill(np.asarray(longer, np.int64))
    except Exception:
        return Row("prefill", -1, 0, IDS, "ids", "host", True)
    note = f"a prompt of {len(longer)} tokens is answered, the KV cache holds {limit}: it is cut silently"
    return Row("prefill", -1, 0, IDS, "ids", "host", False, note=note)


def wrong_length(error: Exception) -> Row:
    """The production prefill counts another number of tokens than it was given."""
    return Row("prefill", -1, 0, LENGTH, "length", "host", False, note=str(error))


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in runs: 3, 7 to 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(a) if a == b else f"{a} to {b}" for a, b in runs[:4]]
    return ", ".join([*shown, *(["..."] if len(runs) > 4 else [])])
