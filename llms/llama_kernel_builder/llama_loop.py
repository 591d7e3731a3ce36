"""Prefill and decode of a Llama-family model, shared by all models.

A model brings the ELFs of its layer and the function that runs them; what is around it is the same for all:
embedding, padding to a bucket, KV cache, final norm, LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from . import host_ops
from .block import Block
from .block_runner import BlockRunner
from .device_config import (
    column_slices,
    device_config,
    pad_array,
    pad_table,
    padded_heads,
    real_heads,
)
from .exceptions import SequenceTooLong
from .kernels import Requirement, recording
from .layer import ON_HOST, Attend, Layer, LayerRun
from .model_config import ModelConfig
from .program import Program
from .rope_table import tile_per_head
from .weights import LayerWeights, ModelWeights, to_gemm_layout

Array = np.ndarray[Any, Any]

BUCKETS = (128, 256, 512, 1024, 2048)
# Suffix of the names of decode ELFs; those of a prompt have `suffix(seq_len)`.
DECODE = ""

# static argument of a block -> attribute of LayerWeights
_STATIC = {
    "norm_w": "attn_norm",
    "ffn_norm_w": "ffn_norm",
    "q_norm_w": "q_norm",
    "k_norm_w": "k_norm",
}


@dataclass(frozen=True)
class KernelSequence:
    """What a model's prefill and decode files provide: the ELFs of its layer, and their order.

    All arrays are bf16 and padded to what the kernels take (:func:`.device_config.device_config`).

    Attributes:
        prefill_blocks: ``(config, seq_len)`` -> the ELFs of one layer over `seq_len` rows.
        prefill_layer: ``(run, x)`` -> (x after the layer, k after RoPE, v), for x [seq_len, emb].
        decode_blocks: ``(config)`` -> the ELFs of one layer over one row.
        decode_layer: ``(run, x)`` -> x after the layer, for x [emb]; K and V go into the KV cache when
            `run.attention` is called.
        lm_head: ``(config)`` -> the ELF from the normed last row to the logits.
    """

    prefill_blocks: Callable[[ModelConfig, int], Layer]
    prefill_layer: Callable[[LayerRun, Array], tuple[Array, Array, Array]]
    decode_blocks: Callable[[ModelConfig], Layer]
    decode_layer: Callable[[LayerRun, Array], Array]
    lm_head: Callable[[ModelConfig], Block]


@dataclass
class KVCache:
    """K (after RoPE) and V of all layers: [n_layers, n_kv_heads, max_seq, head_dim] bf16 each."""

    k: Array
    v: Array

    @classmethod
    def empty(cls, config: ModelConfig, max_seq: int) -> KVCache:
        """Allocate a cache of zeros."""
        shape = (config.n_layers, config.n_kv_heads, max_seq, config.head_dim)
        return cls(np.zeros(shape, dtype=bfloat16), np.zeros(shape, dtype=bfloat16))


@dataclass(frozen=True)
class Pass:
    """What one pass through the layers computes with.

    position: of its first token in the KV cache. rope_lut: rotary rows [positions, head_dim] of decode steps;
    those of a prompt are static arguments of its ELFs. layer_outputs receives [n, emb] of every layer of a
    prompt, [emb] of a decode step.
    """

    sequence: KernelSequence
    config: ModelConfig
    weights: ModelWeights
    cache: KVCache
    position: int
    rope_lut: Array
    layer_outputs: list[Array] | None = None


def bucket_for(length: int, limit: int) -> int:
    """Smallest bucket that holds `length` tokens, of which the model takes up to `limit`.

    Raises SequenceTooLong past the largest bucket: a prompt is never cut silently.
    """
    if length <= limit:
        for bucket in BUCKETS:
            if length <= bucket:
                return bucket
    largest = min(limit, BUCKETS[-1])
    raise SequenceTooLong(
        f"{length} tokens do not fit the largest compiled length {largest}; shorten the prompt"
    )


def buckets_of(config: ModelConfig) -> tuple[int, ...]:
    """Buckets that prompts of this model can need: up to the first that holds its last position."""
    below = (0, *BUCKETS)
    return tuple(size for size, before in zip(BUCKETS, below, strict=False) if before < config.max_position)


def all_blocks(sequence: KernelSequence, config: ModelConfig, buckets: Sequence[int]) -> Iterator[Block]:
    """The ELFs of these prefill buckets, of decode and of the LM head, under their names."""
    for seq_len in buckets:
        yield from (block.named(suffix(seq_len)) for block in sequence.prefill_blocks(config, seq_len))
    yield from sequence.decode_blocks(config)
    yield sequence.lm_head(config)


def all_programs(sequence: KernelSequence, config: ModelConfig) -> Iterator[Program]:
    """The merged ELFs of every prefill bucket, of decode and of the LM head."""
    return (block.merged() for block in all_blocks(sequence, config, buckets_of(config)))


def required_kernels(
    sequence: KernelSequence, config: ModelConfig, buckets: Sequence[int] = BUCKETS
) -> tuple[Requirement, ...]:
    """Every (kernel, shape) the model's blocks need for these prefill buckets and for decode."""
    with recording() as needs:
        list(all_blocks(sequence, config, buckets))
    return tuple(needs)


def suffix(seq_len: int) -> str:
    """Program name suffix of a prefill bucket."""
    return f"_s{seq_len}"


def prepare_prefill(
    run: BlockRunner,
    sequence: KernelSequence,
    weights: ModelWeights,
    config: ModelConfig,
    seq_len: int,
    lut: Array,
    *,
    npu_attn: bool = True,
) -> None:
    """Compile the prefill ELFs of one bucket and write their weights; outside every timed region.

    `npu_attn=False` computes attention on the host.
    """
    tail = suffix(seq_len)
    if tail in run.layers:
        return
    layer_blocks = sequence.prefill_blocks(config, seq_len)
    run.add_layer(tail, layer_blocks if npu_attn else replace(layer_blocks, attention=ON_HOST))
    padded = device_config(config)
    rows = pad_table(lut[:seq_len], padded.head_dim)
    tables = {
        "table_q": tile_per_head(rows, padded.n_heads),
        "table_k": tile_per_head(rows, padded.n_kv_heads),
    }
    for layer, layer_weights in enumerate(weights.layers):
        operands = dict(tables)
        for block in run.layers[tail]:
            names = run.static_names(block.name)
            for name in names:
                if name not in operands:
                    operands[name] = _gemm_operand(layer_weights, name)
            pools = {
                name: f"{name}{tail}" if name in tables else f"prefill.L{layer}.{name}" for name in names
            }
            run.preload(block.name, layer, {name: operands[name] for name in names}, pools)


def prepare_decode(
    run: BlockRunner, sequence: KernelSequence, weights: ModelWeights, config: ModelConfig
) -> None:
    """Compile the decode ELFs and the LM head and write their weights; outside every timed region."""
    if DECODE in run.layers:
        return
    head = sequence.lm_head(config)
    run.add_layer(DECODE, sequence.decode_blocks(config))
    run.add(head.name, head)
    parts = column_slices(config)
    for layer, layer_weights in enumerate(weights.layers):
        for block in run.layers[DECODE]:
            names = run.static_names(block.name)
            static = {name: _gemv_operand(layer_weights, name, parts) for name in names}
            run.preload(block.name, layer, static, {name: f"decode.L{layer}.{name}" for name in names})
    run.preload(head.name, 0, _head_partitions(weights.lm_head, head), {})


def prefill(
    forward: Pass, token_ids: Sequence[int], run: BlockRunner, decode_run: BlockRunner
) -> tuple[int, Array]:
    """Run all layers over a prompt, fill the KV cache, return (first token, its logits [vocab] bf16).

    The prompt is padded to its bucket with the end token; attention is causal, so padding reaches no
    real position. Raises SequenceTooLong for a prompt that fits no bucket or not into the cache.
    """
    config, cache, profiler = forward.config, forward.cache, run.cache.profiler
    ids = np.asarray(token_ids, dtype=np.int64)
    n = int(ids.size)
    if n == 0:
        raise SequenceTooLong("the prompt is empty; prefill needs at least one token")
    seq_len = bucket_for(n, config.max_position)
    if n > cache.k.shape[2]:
        raise SequenceTooLong(f"the prompt has {n} tokens, the KV cache holds {cache.k.shape[2]}")
    with host_ops.host_op(profiler, "eos_pad", nbytes=8 * seq_len):
        padded = np.full(seq_len, config.pad_token, dtype=np.int64)
        padded[:n] = ids
    x = host_ops.embed(profiler, forward.weights.embedding, padded)
    tail = suffix(seq_len)
    attend = None if run.layer(tail).attention.blocks else _host_attention(run, config)
    kv_heads = config.n_kv_heads
    kv_bytes = 4 * n * config.kv_dim
    for layer in range(config.n_layers):
        x, k, v = forward.sequence.prefill_layer(LayerRun(run, tail, layer, attend), x)
        k, v = np.asarray(k), np.asarray(v)
        with host_ops.host_op(profiler, "kv_cache_extract", nbytes=kv_bytes):
            cache.k[layer, :, :n] = real_heads(k[:n], kv_heads, config).transpose(1, 0, 2)
            cache.v[layer, :, :n] = real_heads(v[:n], kv_heads, config).transpose(1, 0, 2)
        if forward.layer_outputs is not None:
            forward.layer_outputs.append(x[:n, : config.emb_dim].copy())
    logits = head(decode_run, forward.weights, config, x[n - 1])
    return top1(logits), logits


def decode_step(forward: Pass, x: Array, run: BlockRunner) -> tuple[int, Array]:
    """One token through all layers at `forward.position`; returns (next token, logits [vocab] bf16).

    x: embedding row [emb] bf16. Raises SequenceTooLong when the position is outside the KV cache.
    """
    config, cache, position = forward.config, forward.cache, forward.position
    max_seq = cache.k.shape[2]
    if not 0 <= position < max_seq:
        raise SequenceTooLong(f"position {position} is outside the KV cache of {max_seq} positions")
    profiler = run.cache.profiler
    padded = device_config(config)
    row = pad_table(forward.rope_lut[position][None], padded.head_dim)
    table_q = np.repeat(row, padded.n_heads, axis=0)
    table_k = np.repeat(row, padded.n_kv_heads, axis=0)
    heads, kv_heads = config.n_heads, config.n_kv_heads
    for layer in range(config.n_layers):

        def attend(q: Array, k: Array, v: Array, layer: int = layer) -> Array:
            cache.k[layer, :, position] = real_heads(k[None], kv_heads, config)[0]
            cache.v[layer, :, position] = real_heads(v[None], kv_heads, config)[0]
            keys, values = cache.k[layer, :, : position + 1], cache.v[layer, :, : position + 1]
            query = real_heads(q[None], heads, config).reshape(-1)
            out = host_ops.decode_attention(profiler, query, keys, values, heads)
            padded_out: Array = padded_heads(out[None], config)[0]
            return padded_out

        bound = LayerRun(run, DECODE, layer, attend, table_q=table_q, table_k=table_k)
        x = forward.sequence.decode_layer(bound, x)
        if forward.layer_outputs is not None:
            forward.layer_outputs.append(x[: config.emb_dim].copy())
    logits = head(run, forward.weights, config, x)
    return top1(logits), logits


def head(run: BlockRunner, weights: ModelWeights, config: ModelConfig, row: Array) -> Array:
    """Final norm of one row on the host, LM head on the device; logits [vocab] bf16."""
    real = row[: config.emb_dim]
    normed = host_ops.final_rms_norm(run.cache.profiler, real, weights.final_norm, config.rms_eps)
    parts = run("lm_head_gemv", 0, x=pad_array(normed, row.shape))
    logits: Array = np.concatenate(list(parts.values())) if len(parts) > 1 else next(iter(parts.values()))
    return logits[: config.vocab_size]


def top1(logits: Array) -> int:
    """Greedy choice: the first of the largest logits."""
    return int(np.argmax(host_ops.widen(logits)))


def _host_attention(run: BlockRunner, config: ModelConfig) -> Attend:
    def attend(q: Array, k: Array, v: Array) -> Array:
        heads, kv_heads, seq = config.n_heads, config.n_kv_heads, q.shape[0]
        queries, keys, values = (
            real_heads(array, count, config).reshape(seq, -1)
            for array, count in ((q, heads), (k, kv_heads), (v, kv_heads))
        )
        out = host_ops.prefill_attention(run.cache.profiler, queries, keys, values, heads, kv_heads)
        return padded_heads(out, config)

    return attend


def _gemm_operand(weights: LayerWeights, argument: str) -> Array:
    array: Array = getattr(weights, _STATIC.get(argument, argument))
    return array if array.ndim == 1 else to_gemm_layout(array)


def _gemv_operand(weights: LayerWeights, argument: str, parts: Mapping[str, tuple[str, slice]]) -> Array:
    if argument in parts:
        name, columns = parts[argument]
        return np.ascontiguousarray(getattr(weights, name)[:, columns])
    array: Array = getattr(weights, _STATIC.get(argument, argument))
    return array


def _head_partitions(matrix: Array, block: Block) -> dict[str, Array]:
    rows, width = next(buffer.shape for buffer in block.buffers if buffer.role == "static")
    parts: dict[str, Array] = {}
    for p, name in enumerate(block.arguments("static")):
        part = pad_array(matrix[p * rows : (p + 1) * rows], (rows, width))
        parts[name] = np.ascontiguousarray(part)
    return parts
