"""The programs of a deployed model as plain launch lists: which launches, in which program, merged or split.

The forms follow the published deployments (Xilinx/mlir-air e972f2942, `programming_examples/llms`): three
programs per prefill layer where output projection and FFN fit one, seven where the hidden size does not;
two programs per decode layer where the cascade form exists (emb below 2560, every K a multiple of 512), else
five.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from npu_twin.constraints import gemv_slices
from npu_twin.opset import Config
from npu_twin.timing import tiling
from npu_twin.timing.model_config import ModelSizes

_BF16 = 2
MERGED_HIDDEN_LIMIT = 8192
"""Largest hidden size with output projection and FFN published in one program; 8960 and up do not fit."""
FUSED_EMB_LIMIT = 2560
FUSED_K_MULTIPLE = 512
WHOLE_VOCABULARY = 49152
LARGE_PARTITION = 16384
SMALL_PARTITION = 8192
MOST_LARGE_PARTITIONS = 8
"""About eight launches are the practical size of a program."""


@dataclass(frozen=True)
class Program:
    """One program of a model and how it is called.

    Attributes:
        name: name of the program.
        launches: its launches in order.
        calls: number of calls per prompt or token.
        written: sizes in bytes of the buffers that the host writes before each call.
        read: sizes in bytes of the buffers that it reads after each call.
    """

    name: str
    launches: tuple[Config, ...]
    calls: int
    written: tuple[int, ...]
    read: tuple[int, ...]


def merged_ffn(sizes: ModelSizes) -> bool:
    """Return whether output projection and FFN of a prefill layer are one program."""
    return sizes.hidden <= MERGED_HIDDEN_LIMIT and sizes.hidden % 512 == 0


def fused_decode(sizes: ModelSizes) -> bool:
    """Return whether a decode layer uses the cascade form: two programs instead of five."""
    contractions = (sizes.emb, sizes.q_dim, sizes.hidden)
    return sizes.emb < FUSED_EMB_LIMIT and all(k % FUSED_K_MULTIPLE == 0 for k in contractions)


def transposed_attention(sizes: ModelSizes) -> bool:
    """Return whether the host transposes the operands of attention on the device to heads first."""
    return sizes.host_attention is None and sizes.head_dim > 64


def vocabulary_partitions(vocab: int) -> tuple[int, int]:
    """Return number and rows of the partitions of the LM head."""
    if vocab <= WHOLE_VOCABULARY:
        return 1, -(-vocab // 64) * 64
    large = -(-vocab // LARGE_PARTITION)
    if large <= MOST_LARGE_PARTITIONS:
        return large, LARGE_PARTITION
    return -(-vocab // SMALL_PARTITION), SMALL_PARTITION


def _norm(rows: int, width: int, name: str) -> Config:
    return Config("rms_norm", "weighted", {"M": rows, "N": width}, {}, tiling.rows_herd(rows), name=name)


def _rope(rows: int, head_dim: int, name: str) -> Config:
    dims = {"rows": rows, "head_dim": head_dim}
    return Config("rope", "half_split", dims, {}, tiling.rows_herd(rows), name=name)


def _bias(rows: int, width: int, name: str) -> Config:
    return Config("bias_add", "", {"rows": rows, "n": width}, {}, (8, 1), name=name)


def _flat(op: str, n: int, name: str) -> Config:
    return Config(op, "", {"n": n}, {}, (8, 1), name=name)


def _named(call: Config, name: str) -> Config:
    return Config(call.op, call.method, call.dims, call.tile, call.herd, call.attrs, name)


def _gemm(m: int, k: int, n: int, name: str) -> Config:
    return _named(tiling.gemm(m, k, n), name)


def _gemv(m: int, k: int, name: str) -> Config:
    return _named(tiling.gemv(m, k), name)


def _qkv_name(sizes: ModelSizes, decode: bool) -> str:
    if sizes.qkv_bias:
        name = "rms_qkv_bias_rope"
    elif sizes.qk_norm:
        name = "rms_qkv_qknorm_rope"
    else:
        return "rms_gemv_rope" if decode else "rms_gemms_rope"
    return name + "_gemv" if decode else name


def _after_projection(sizes: ModelSizes, rows: int) -> Iterator[Config]:
    if sizes.qkv_bias:
        yield _bias(rows, sizes.q_dim, "q_bias")
        yield _bias(rows, sizes.kv_dim, "k_bias")
        yield _bias(rows, sizes.kv_dim, "v_bias")
    if sizes.qk_norm:
        yield _norm(rows * sizes.q_heads, sizes.head_dim, "q_norm")
        yield _norm(rows * sizes.kv_heads, sizes.head_dim, "k_norm")
    yield _rope(rows * sizes.q_heads, sizes.head_dim, "q_rope")
    yield _rope(rows * sizes.kv_heads, sizes.head_dim, "k_rope")


def prefill_programs(sizes: ModelSizes, seq_len: int) -> list[Program]:
    """Return the programs that one layer of a prefill of `seq_len` tokens calls, once for each layer."""
    m, emb, hidden, layers = seq_len, sizes.emb, sizes.hidden, sizes.n_layers
    x, q, kv = (_BF16 * m * width for width in (emb, sizes.q_dim, sizes.kv_dim))
    first = [
        _norm(m, emb, "rms"),
        _gemm(m, emb, sizes.q_dim, "q"),
        _gemm(m, emb, sizes.kv_dim, "k"),
        _gemm(m, emb, sizes.kv_dim, "v"),
        *_after_projection(sizes, m),
    ]
    programs = [Program(_qkv_name(sizes, decode=False), tuple(first), layers, (x,), (q, kv, kv))]
    if sizes.host_attention is None:
        attention = tiling.attention(m, m, sizes.head_dim, sizes.q_heads, sizes.kv_heads, causal=True)
        one = (_named(attention, "attention"),)
        programs.append(Program("flash_attn", one, layers, (q, kv, kv, q), (q,)))
    output = [
        _gemm(m, sizes.q_dim, emb, "o"),
        _flat("eltwise_add", m * emb, "res_add"),
        _norm(m, emb, "ffn_rms"),
    ]
    gate, up = _gemm(m, emb, hidden, "gate"), _gemm(m, emb, hidden, "up")
    swiglu = _flat("silu_mul", m * hidden, "swiglu")
    down = [_gemm(m, hidden, emb, "down"), _flat("eltwise_add", m * emb, "ffn_add")]
    if merged_ffn(sizes):
        programs.append(Program("o_ffn", (*output, gate, up, swiglu, *down), layers, (q, x), (x,)))
        return programs
    # What one part hands to the next stays on the device: output and input are one buffer.
    if hidden <= MERGED_HIDDEN_LIMIT:
        parts = [("o_ffn_head", [*output, gate, up, swiglu])]
    else:
        parts = [("o_res_norm", output), ("gate", [gate]), ("up", [up]), ("swiglu", [swiglu])]
    for name, launches in [*parts, ("down_add", down)]:
        written = (q, x) if name == parts[0][0] else ()
        programs.append(Program(name, tuple(launches), layers, written, (x,) if name == "down_add" else ()))
    return programs


def decode_programs(sizes: ModelSizes) -> list[Program]:
    """Return the programs that one layer of a decode step calls, once for each layer."""
    emb, hidden, layers = sizes.emb, sizes.hidden, sizes.n_layers
    x, q, kv = (_BF16 * width for width in (emb, sizes.q_dim, sizes.kv_dim))
    first = [
        _norm(1, emb, "rms"),
        _gemv(sizes.q_dim, emb, "q"),
        _gemv(sizes.kv_dim, emb, "k"),
        _gemv(sizes.kv_dim, emb, "v"),
        *_after_projection(sizes, 1),
    ]
    programs = [Program(_qkv_name(sizes, decode=True), tuple(first), layers, (x, q, kv), (q, kv, kv))]
    if fused_decode(sizes):
        launches = (
            Config("gemv_add", "cascade", {"M": emb, "K": sizes.q_dim}, {"tile_m": 8}, name="o_add"),
            Config(
                "norm_gateup_swiglu", "cascade", {"emb": emb, "hidden": hidden}, {"tile_m": 8}, name="ffn"
            ),
            Config("gemv_add", "cascade", {"M": emb, "K": hidden}, {"tile_m": 8}, name="down_add"),
        )
        programs.append(Program("o_gemv_ffn", launches, layers, (q, x), (x,)))
        return programs
    for name, rows, width in (
        ("o_gemv", emb, sizes.q_dim),
        ("gate_gemv", hidden, emb),
        ("up_gemv", hidden, emb),
        ("down_gemv", emb, hidden),
    ):
        matvec = tuple(_matvec(rows, width, name))
        programs.append(Program(name, matvec, layers, (_BF16 * width,), (_BF16 * rows,)))
    return programs


def _matvec(rows: int, width: int, name: str) -> Iterator[Config]:
    """Yield one GEMV, or one per slice of columns where none holds all, and the adds of their results."""
    slices = gemv_slices(rows, width) or (width,)
    for part in slices:
        yield _gemv(rows, part, name)
    for _ in slices[1:]:
        yield _flat("eltwise_add", rows, f"{name}_sum")


def head_program(sizes: ModelSizes) -> Program:
    """Return the LM head: one launch for each partition of the vocabulary, called once per token."""
    count, rows = vocabulary_partitions(sizes.vocab)
    launch = _gemv(rows, sizes.emb, "lm_head")
    return Program("lm_head_gemv", (launch,) * count, 1, (_BF16 * sizes.emb,), (_BF16 * rows,) * count)
