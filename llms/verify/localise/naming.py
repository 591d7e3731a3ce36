"""Words for what was found: which buffer is which result, where a cache slot went."""

from __future__ import annotations

import numpy as np

from llms.verify.contract.launches import ElfRun, Launch
from llms.verify.contract.records import Array
from llms.verify.localise.judge import cosine


def figure(ok: bool, given: Array, wanted: Array) -> float:
    """Cosine of what differs; of what is equal it is known."""
    if ok:
        return 1.0
    return cosine(given, wanted) if given.size == wanted.size else float("nan")


def bits(array: Array) -> Array:
    """bf16 as it lies in memory."""
    return np.ascontiguousarray(array).view(np.uint16)


def same_bits(a: Array, b: Array) -> bool:
    """Whether two bf16 arrays hold the same values in the same order, whatever their shapes."""
    return a.size == b.size and np.array_equal(bits(a).ravel(), bits(b).ravel())


def own_name(run: ElfRun, name: str) -> str:
    """`normed` is two things: the input of Q, K and V, and that of the feed-forward part."""
    if name != "normed":
        return name
    return "attn_normed" if run.roles.keys() & {"wq", "wk", "wv", "norm_w"} else "ffn_normed"


def result_name(launch: Launch) -> str:
    """Result that a launch writes: as :func:`own_name`."""
    if launch.writes != "normed":
        return launch.writes
    return "attn_normed" if launch.reads.get("w") == "norm_w" else "ffn_normed"


def slots(name: str, want: Array, held: Array) -> str:
    """What is wrong with the slots of one layer: [kv_heads, n, d] against [kv_heads, max_seq, d]."""
    n = want.shape[1]
    if held.ndim != 3 or held.shape[0] != want.shape[0] or held.shape[1] < n:
        return f"the {name} cache is {held.shape}, {want.shape} were computed"
    wrong = np.flatnonzero((want != held[:, :n]).any(axis=(0, 2)))
    slot = int(wrong[0])
    hits = np.flatnonzero((held == want[:, slot : slot + 1]).all(axis=(0, 2)))
    where = f", it is in slot {hits[0]}" if hits.size else ""
    return f"{name} of position {slot} is not in its slot{where} ({wrong.size} of {n} positions wrong)"
