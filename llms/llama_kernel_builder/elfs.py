"""The ELFs of the Llama family, each stage of a layer under the name of its ELF.

Names and argument order follow the mlir-air LLM examples (e972f2942). A prompt and a decode step take the
same kernels (`ops.Ops`): GEMMs over `seq_len` rows, or GEMVs over one, which the names with `gemv` are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from . import kernels
from .block import Arrays, Block, Op, Step, make_block
from .device_config import attends_on_device, device_config, ffn_form
from .exceptions import ConfigError
from .layer import ON_HOST, Stage
from .model_config import ModelConfig
from .ops import Ops
from .program import Buffer

# Rows of one LM-head partition that every published K allows (mlir-air kernel registry).
PARTITION_ROWS = 16384
# Launches of one ELF that the compiler's stack holds (npu_twin.constraints, rule M6).
MOST_PARTITIONS = 10


def rms_gemms_rope(config: ModelConfig, seq_len: int) -> Stage:
    """RMSNorm; Q, K, V; RoPE of Q and K: Llama."""
    return _qkv("rms_gemms_rope", config, seq_len)


def rms_gemv_rope(config: ModelConfig) -> Stage:
    """`rms_gemms_rope` of one row."""
    return _qkv("rms_gemv_rope", config, 1)


def rms_qkv_bias_rope(config: ModelConfig, seq_len: int) -> Stage:
    """RMSNorm; Q, K, V; a bias on each; RoPE of Q and K: Qwen2."""
    return _qkv("rms_qkv_bias_rope", config, seq_len, bias=True)


def rms_qkv_bias_rope_gemv(config: ModelConfig) -> Stage:
    """`rms_qkv_bias_rope` of one row."""
    return _qkv("rms_qkv_bias_rope_gemv", config, 1, bias=True)


def rms_qkv_qknorm_rope(config: ModelConfig, seq_len: int) -> Stage:
    """RMSNorm; Q, K, V; a norm per head of Q and K; RoPE of both: Qwen3."""
    return _qkv("rms_qkv_qknorm_rope", config, seq_len, head_norm=True)


def rms_qkv_qknorm_rope_gemv(config: ModelConfig) -> Stage:
    """`rms_qkv_qknorm_rope` of one row."""
    return _qkv("rms_qkv_qknorm_rope_gemv", config, 1, head_norm=True)


def rms_qkv_bias_qknorm_rope(config: ModelConfig, seq_len: int) -> Stage:
    """RMSNorm; Q, K, V; a bias on each; a norm per head of Q and K; RoPE of both.

    Two ELFs, rms_qkv_bias and qknorm_rope: it is 11 launches (npu_twin.constraints, rule M6: at most 10).
    """
    return _qkv("rms_qkv_bias_qknorm_rope", config, seq_len, bias=True, head_norm=True)


def rms_qkv_bias_qknorm_rope_gemv(config: ModelConfig) -> Stage:
    """`rms_qkv_bias_qknorm_rope` of one row; its ELFs are rms_qkv_bias_gemv and qknorm_rope_gemv."""
    return _qkv("rms_qkv_bias_qknorm_rope_gemv", config, 1, bias=True, head_norm=True)


def _qkv(name: str, config: ModelConfig, rows: int, *, bias: bool = False, head_norm: bool = False) -> Stage:
    if (bias, head_norm) != (config.qkv_bias, config.qk_norm):
        raise ConfigError(
            f"{name} has {'a' if bias else 'no'} bias and {'a' if head_norm else 'no'} norm per head; the "
            f"configuration says qkv_bias {config.qkv_bias}, qk_norm {config.qk_norm}: build "
            f"{qkv_of(config)[rows == 1].__name__} instead"
        )
    on, c = Ops(config, rows), device_config(config)
    widths = {"q": c.q_dim, "k": c.kv_dim, "v": c.kv_dim}
    heads = {"q": c.n_heads, "k": c.n_kv_heads}
    e = c.emb_dim
    ops = [on.norm("rms", "x", "norm_w", "normed")]
    ops += [on.product(key, "normed", f"w{key}", key, (e, width)) for key, width in widths.items()]
    done = {key: key for key in widths}
    if bias:
        ops += [on.bias(f"{key}_bias", key, f"b{key}", width) for key, width in widths.items()]
        done = {key: f"{key}_biased" for key in widths}
    projected = dict(done)
    head_ops: list[Op] = []
    if head_norm:
        head_ops += [on.head_norm(key, done[key], count) for key, count in heads.items()]
        done |= {key: f"{key}_normed" for key in heads}
    head_ops += [on.rope(key, done[key], count) for key, count in heads.items()]
    roped = ("q_roped", "k_roped")
    outputs = (*roped, projected["v"])
    if not (bias and head_norm):
        return Stage((make_block(name, [*ops, *head_ops], outputs, last=roped),), outputs)
    kind = "_gemv" if on.one else ""
    norms = [f"{key}_{what}" for key in heads for what in ("norm_w", "normed")]
    return Stage(
        (
            make_block(f"rms_qkv_bias{kind}", ops, tuple(projected.values())),
            make_block(f"qknorm_rope{kind}", head_ops, roped, last=(*norms, "table_q", "table_k", *roped)),
        ),
        outputs,
    )


def qkv_of(config: ModelConfig) -> tuple[Callable[[ModelConfig, int], Stage], Callable[[ModelConfig], Stage]]:
    """The first stage of a layer for this configuration, of a prompt and of a decode step."""
    return {
        (False, False): (rms_gemms_rope, rms_gemv_rope),
        (True, False): (rms_qkv_bias_rope, rms_qkv_bias_rope_gemv),
        (False, True): (rms_qkv_qknorm_rope, rms_qkv_qknorm_rope_gemv),
        (True, True): (rms_qkv_bias_qknorm_rope, rms_qkv_bias_qknorm_rope_gemv),
    }[config.qkv_bias, config.qk_norm]


def flash_attn(config: ModelConfig, seq_len: int) -> Stage:
    """Causal attention; never merged with others (it owns channels and cascade).

    On the host for head sizes without a device kernel. head_dim 64 reads the projections as they are; 128
    wants heads first, which the host arranges because the DMA cannot transpose bf16.
    """
    if not attends_on_device(config):
        return ON_HOST
    c = device_config(config)
    s, d = seq_len, c.head_dim
    spec = kernels.flash_attention(s, d, c.n_heads, c.n_kv_heads)
    names = {"q": "q", "k": "k", "v": "v", "out": "attn"}
    shapes = {names[operand]: signature.shape for operand, signature in spec.signature().items()}
    op = Op(Step("attn", spec, names), tuple(Buffer(name, shape) for name, shape in shapes.items()))
    if spec.method == "seq_first":
        return Stage((make_block("flash_attn", [op], ("attn",)),), ("attn",))
    dv_tile = shapes["v"][2]

    def pack(arrays: Arrays) -> Arrays:
        k_heads = arrays["k"].reshape(s, c.n_kv_heads, d).transpose(1, 0, 2)
        q_heads = arrays["q"].reshape(s, c.n_heads, d).transpose(1, 0, 2)
        v_heads = arrays["v"].reshape(s, c.n_kv_heads * (d // dv_tile), dv_tile).transpose(1, 0, 2)
        return {name: np.ascontiguousarray(a) for name, a in (("q", q_heads), ("k", k_heads), ("v", v_heads))}

    def unpack(arrays: Arrays) -> Arrays:
        return {"attn": np.ascontiguousarray(arrays["attn"].transpose(1, 0, 2)).reshape(s, c.q_dim)}

    return Stage((make_block("flash_attn", [op], ("attn",), pack=pack, unpack=unpack),), ("attn",))


def o_ffn(config: ModelConfig, seq_len: int) -> Stage:
    """Output projection, residual, RMSNorm, SwiGLU feed-forward, residual: one, two or five ELFs by width."""
    head, gate, up, swiglu, down = _ffn(Ops(config, seq_len))
    form = ffn_form(config)
    blocks: tuple[Block, ...]
    if form == "merged":
        blocks = (make_block("o_ffn", [*head, gate, up, swiglu, *down], ("out",)),)
    else:
        down_add = make_block("down_add", down, ("out",), last=("swiglu", "out", "res1"))
        if form == "head_down":
            blocks = (make_block("o_ffn_head", [*head, gate, up, swiglu], ("res1", "swiglu")), down_add)
        else:
            blocks = (
                make_block("o_res_norm", head, ("res1", "normed")),
                make_block("gate", [gate], ("gate",), last=("normed",)),
                make_block("up", [up], ("up",), last=("normed",)),
                make_block("swiglu", [swiglu], ("swiglu",), last=("gate", "up")),
                down_add,
            )
    return Stage(blocks, ("out",))


def o_gemv_ffn(config: ModelConfig) -> Stage:
    """`o_ffn` of one row: one ELF of eight launches, or three where that does not fit.

    It has no K % 512 rule (that one belongs to the cascade GEMV with residual add), so one ELF is legal
    wherever the GEMVs are whole. The sum of squares of the norms is f32.
    """
    head, gate, up, swiglu, down = _ffn(Ops(config, 1))
    if ffn_form(config) != "split":
        return Stage((make_block("o_gemv_ffn", [*head, gate, up, swiglu, *down], ("out",)),), ("out",))
    blocks = (
        make_block("o_gemv_res_norm", head, ("res1", "normed")),
        make_block("gate_up_gemv", [gate, up, swiglu], ("swiglu",)),
        make_block("down_gemv_add", down, ("out",)),
    )
    return Stage(blocks, ("out",))


def _ffn(on: Ops) -> tuple[list[Op], Op, Op, Op, list[Op]]:
    """Output projection to second norm, gate, up, SwiGLU, down projection with its residual."""
    c, e, h = on.padded, on.padded.emb_dim, on.padded.hidden_dim
    head = [on.product("o", "attn", "wo", "proj", (c.q_dim, e))]
    if on.config.o_bias:
        head.append(on.bias("o_bias", "proj", "bo", e))
    projected = "proj_biased" if on.config.o_bias else "proj"
    head.append(on.add("res_add", projected, "residual", "res1"))
    head.append(on.norm("ffn_rms", "res1", "ffn_norm_w", "normed"))
    gate, up = (on.product(key, "normed", f"w_{key}", key, (e, h)) for key in ("gate", "up"))
    return head, gate, up, on.silu_mul(), [*on.down(), on.add("ffn_add", "down", "res1", "out", flat=True)]


def lm_head_gemv(config: ModelConfig, partition_rows: int | None = None) -> Block:
    """LM head of one row over vocabulary partitions, the last one zero-padded.

    A partition has a multiple of 16384 rows where the vocabulary would take more launches than one ELF has.
    """
    c = device_config(config)
    if partition_rows is None:
        most = PARTITION_ROWS * -(-c.vocab_size // (PARTITION_ROWS * MOST_PARTITIONS))
        partition_rows = min(most, -(-c.vocab_size // 64) * 64)
    spec, ops = kernels.gemv(partition_rows, c.emb_dim), []
    for p in range(-(-c.vocab_size // partition_rows)):
        step = Step(f"lm_head{p}", spec, {"w": f"w{p}", "x": "x", "out": f"logits{p}"})
        sizes = (
            ("x", (c.emb_dim,)),
            (f"w{p}", (partition_rows, c.emb_dim)),
            (f"logits{p}", (partition_rows,)),
        )
        x, weight, logits = (Buffer(name, shape) for name, shape in sizes)
        ops.append(Op(step, (x, replace(weight, role="static"), logits)))
    return make_block("lm_head_gemv", ops, [op.step.names["out"] for op in ops])
