"""Words for what was found: which buffer is which result, whose launch reads it, where a cache slot went."""

from __future__ import annotations

from typing import Any

import numpy as np

from llms.verify.localise.judge import cosine
from llms.verify.localise.tap import Call

Array = np.ndarray[Any, Any]


def figure(ok: bool, given: Array, wanted: Array) -> float:
    """Cosine of what differs; of what is equal it is known."""
    if ok:
        return 1.0
    return cosine(given, wanted) if given.size == wanted.size else float("nan")


def bits(array: Array) -> Array:
    """bf16 as it lies in memory."""
    return np.ascontiguousarray(array).view(np.uint16)


def own_name(call: Call, name: str) -> str:
    """`normed` is two things: the input of Q, K and V, and that of the feed-forward part."""
    if name != "normed":
        return name
    names = {buffer.name for buffer in call.program.buffers}
    return "attn_normed" if names & {"wq", "wk", "wv", "norm_w"} else "ffn_normed"


def result_name(call: Call, launch: Any, buffer: str) -> str:
    """Result that a launch writes: as :func:`own_name`."""
    if buffer != "normed":
        return buffer
    weight = dict(launch.operands).get("w")
    return "attn_normed" if weight is not None and weight.buffer == "norm_w" else "ffn_normed"


def reader(call: Call, name: str) -> str:
    """Label of the launch that reads a buffer."""
    for launch in call.program.launches:
        operands = dict(launch.operands)
        if any(ref.buffer == name for key, ref in operands.items() if key != "out"):
            return call.label(operands["out"].buffer)
    return call.program.name


def slots(name: str, want: Array, held: Array) -> str:
    """What is wrong with the slots of one layer: [kv_heads, n, d] against [kv_heads, max_seq, d]."""
    n = want.shape[1]
    if held.ndim != 3 or held.shape[0] != want.shape[0] or held.shape[1] < n:
        return f"the {name} cache is {held.shape}, {want.shape} were computed"
    wrong = np.flatnonzero((want != held[:, :n]).any(axis=(0, 2)))
    slot = int(wrong[0])
    hits = np.flatnonzero((held == want[:, slot : slot + 1]).all(axis=(0, 2)))
    found = f", it is in slot {hits[0]}" if hits.size else ""
    return f"{name} of position {slot} is not in its slot{found} ({wrong.size} of {n} positions wrong)"
