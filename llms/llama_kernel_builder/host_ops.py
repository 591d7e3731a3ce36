"""Work of the host CPU between ELFs. Every operation is declared to the device clock and the profiler.

Names are those of the mlir-air profiles: tokenize, eos_pad, embed_lookup, kv_cache_extract,
final_rms_norm, decode_attention_cpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from fixed_order.attention import attend

from . import timeline
from .profiler import Profiler

Array = np.ndarray[Any, Any]


@contextmanager
def host_op(profiler: Profiler, name: str, *, nbytes: int = 0, flops: int = 0) -> Iterator[None]:
    """Run host work under a name: counted on the device clock, shown in the profile."""
    clock = profiler.clock
    begin = clock.now()
    with clock.host_op(name, nbytes=nbytes, flops=flops):
        yield
    if profiler.enabled:
        profiler.add("host", name, clock.now() - begin, nbytes)
    if timeline.recorders:
        timeline.record(clock, timeline.HOST, "host", name, begin, bytes=nbytes)


def widen(array: Array) -> Array:
    """bf16 -> f32, exact."""
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def embed(profiler: Profiler, table: Array, token_ids: Array) -> Array:
    """Rows of the embedding table: [n, emb] bf16."""
    nbytes = 4 * token_ids.size * table.shape[1]
    with host_op(profiler, "embed_lookup", nbytes=nbytes):
        rows: Array = table[token_ids]
        return rows


def final_rms_norm(profiler: Profiler, row: Array, weight: Array, eps: float) -> Array:
    """RMSNorm of one row [emb] in f32 with f32 weight, one cast to bf16."""
    with host_op(profiler, "final_rms_norm", nbytes=6 * row.size, flops=4 * row.size):
        x = widen(row)  # numpy's mean has one order on every CPU: pairs of eight running sums
        scale = np.float32(1.0) / np.sqrt(np.mean(x * x, dtype=np.float32) + np.float32(eps))
        normed: Array = (x * scale * widen(weight)).astype(bfloat16)
        return normed


def decode_attention(profiler: Profiler, q: Array, keys: Array, values: Array, n_heads: int) -> Array:
    """One query row over the cache in f32, result bf16.

    q [n_heads * d] bf16; keys and values [n_kv_heads, length, d] bf16 (a view of one layer's cache up to
    the current position). Query head h reads KV head h // (n_heads / n_kv_heads).
    """
    kv_heads, length, d = keys.shape
    with host_op(
        profiler, "decode_attention_cpu", nbytes=4 * kv_heads * length * d, flops=4 * n_heads * length * d
    ):
        out = np.empty((1, n_heads, d), np.uint16)
        query = np.ascontiguousarray(q).view(np.uint16).reshape(1, n_heads, d)
        attend(query, keys.view(np.uint16), values.view(np.uint16), out, keys=length)
        return out.reshape(n_heads * d).view(bfloat16)


def prefill_attention(
    profiler: Profiler, q: Array, k: Array, v: Array, n_heads: int, n_kv_heads: int
) -> Array:
    """Causal attention of a whole prompt on the host in f32, for models whose heads no device kernel takes.

    q [seq, n_heads * d], k and v [seq, n_kv_heads * d] bf16; returns [seq, n_heads * d] bf16. One query of
    one head at a time, so the scores of one query are all that is in memory.
    """
    seq = q.shape[0]
    d = q.shape[1] // n_heads
    flops = 4 * n_heads * seq * seq * d
    with host_op(profiler, "prefill_attention_cpu", nbytes=q.nbytes * 2 + k.nbytes * 2, flops=flops):
        queries, keys, values = (
            np.ascontiguousarray(x).view(np.uint16).reshape(seq, -1, d) for x in (q, k, v)
        )
        out = np.empty((seq, n_heads, d), np.uint16)
        attend(queries, keys.transpose(1, 0, 2), values.transpose(1, 0, 2), out, keys=1, causal=True)
        return out.reshape(seq, n_heads * d).view(bfloat16)
