"""Work of the host CPU between ELFs. Every operation is declared to the device clock and the profiler.

Names are those of the mlir-air profiles: tokenize, eos_pad, embed_lookup, kv_cache_extract,
final_rms_norm, decode_attention_cpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from . import timeline
from .profiler import Profiler

Array = np.ndarray[Any, Any]


@contextmanager
def host_op(profiler: Profiler, name: str, *, nbytes: int = 0, flops: int = 0) -> Iterator[None]:
    """Run host work under a name: counted on the device clock, shown in the profile."""
    clock = profiler.clock
    if not profiler.enabled and not timeline.recorders:
        with clock.host_op(name, nbytes=nbytes, flops=flops):
            yield
        return
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
        x = widen(row)
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
        query = widen(q).reshape(kv_heads, n_heads // kv_heads, d)
        scores = query @ widen(np.ascontiguousarray(keys)).transpose(0, 2, 1)
        scores *= np.float32(1.0 / sqrt(d))
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out = scores @ widen(np.ascontiguousarray(values))
        return out.reshape(n_heads * d).astype(bfloat16)


def prefill_attention(
    profiler: Profiler, q: Array, k: Array, v: Array, n_heads: int, n_kv_heads: int
) -> Array:
    """Causal attention of a whole prompt on the host in f32, for models whose heads no device kernel takes.

    q [seq, n_heads * d], k and v [seq, n_kv_heads * d] bf16; returns [seq, n_heads * d] bf16. One head at
    a time, so the scores of one head are all that is in memory.
    """
    seq = q.shape[0]
    d = q.shape[1] // n_heads
    flops = 4 * n_heads * seq * seq * d
    with host_op(profiler, "prefill_attention_cpu", nbytes=q.nbytes * 2 + k.nbytes * 2, flops=flops):
        queries = widen(q).reshape(seq, n_heads, d)
        keys, values = widen(k).reshape(seq, n_kv_heads, d), widen(v).reshape(seq, n_kv_heads, d)
        hidden = np.triu(np.ones((seq, seq), dtype=bool), k=1)
        out = np.empty((seq, n_heads, d), dtype=np.float32)
        for head in range(n_heads):
            kv = head // (n_heads // n_kv_heads)
            scores = queries[:, head] @ keys[:, kv].T * np.float32(1.0 / sqrt(d))
            scores[hidden] = -np.inf
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=1, keepdims=True)
            out[:, head] = scores @ values[:, kv]
        return out.reshape(seq, n_heads * d).astype(bfloat16)
