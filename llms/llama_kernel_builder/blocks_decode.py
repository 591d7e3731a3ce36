"""Decode ELFs of the Llama family: one row, GEMVs instead of GEMMs, attention on the host between them.

The eight-launch form of O+FFN has no K % 512 rule (that one belongs to the cascade GEMV with residual add),
so it is legal for every width. The sum of squares of the norms is f32. Where no GEMV holds the columns of the
down projection (hidden 14336 and 18944 of the published 8B and 7B sizes), it is one GEMV per slice of them.
"""

from __future__ import annotations

from . import kernels
from .block import Block, Step, given, inner, make_block, result, static
from .blocks_prefill import before_rope, projected, split_at, splits_qkv, v_name
from .device_config import device_config, ffn_form, gemv_slices, norm_eps
from .model_config import ModelConfig
from .program import Buffer, OperandRef


def gemv_name(config: ModelConfig) -> str:
    """Name of the first ELF of a layer."""
    if config.qk_norm:
        return "rms_qkv_bias_qknorm_rope_gemv" if config.qkv_bias else "rms_qkv_qknorm_rope_gemv"
    return "rms_qkv_bias_rope_gemv" if config.qkv_bias else "rms_gemv_rope"


def rms_gemv_rope(config: ModelConfig) -> Block:
    """First ELF of a layer: RMSNorm, Q/K/V, bias and per-head norm where the model has them, RoPE."""
    c = device_config(config)
    e, d = c.emb_dim, c.head_dim
    eps = norm_eps(config.emb_dim, e, config.rms_eps)
    widths = {"q": c.q_dim, "k": c.kv_dim, "v": c.kv_dim}
    heads = {"q": c.n_heads, "k": c.n_kv_heads}
    buffers = [given("x", e), static("norm_w", e), inner("normed", e)]
    steps = [Step("rms", kernels.rms_norm(1, e, eps), {"x": "x", "w": "norm_w", "out": "normed"})]
    for name, width in widths.items():
        make = result if name == v_name(config) else inner
        buffers += [static(f"w{name}", width, e), make(name, width)]
        steps.append(
            Step(f"{name}_gemv", kernels.gemv(width, e), {"w": f"w{name}", "x": "normed", "out": name})
        )
    if config.qkv_bias:
        for name, width in widths.items():
            make = result if name == "v" else inner
            buffers += [static(f"b{name}", width), make(f"{name}_biased", width)]
            operands = {"a": name, "b": f"b{name}", "out": f"{name}_biased"}
            steps.append(Step(f"{name}_bias", kernels.eltwise_add(width), operands))
    if config.qk_norm:
        head_eps = norm_eps(config.head_dim, d, config.rms_eps)
        for name, count in heads.items():
            source = f"{name}_biased" if config.qkv_bias else name
            buffers += [static(f"{name}_norm_w", d), inner(f"{name}_normed", widths[name])]
            operands = {"x": source, "w": f"{name}_norm_w", "out": f"{name}_normed"}
            steps.append(Step(f"{name}_norm", kernels.rms_norm(count, d, head_eps), operands))
    buffers += [given(f"table_{name}", count, d) for name, count in heads.items()]
    for name, count in heads.items():
        buffers.append(result(f"{name}_roped", widths[name]))
        operands = {"x": before_rope(config, name), "table": f"table_{name}", "out": f"{name}_roped"}
        steps.append(Step(f"rope_{name}", kernels.rope(count, d), operands))
    return make_block(gemv_name(config), buffers, steps)


def qkv_gemv(config: ModelConfig) -> tuple[Block, ...]:
    """Everything of a layer before attention, in one ELF or two."""
    block = rms_gemv_rope(config)
    names = ("rms_qkv_bias_gemv", "qknorm_rope_gemv")
    return split_at(block, "q_norm", names) if splits_qkv(config) else (block,)


def ffn_gemv(config: ModelConfig) -> tuple[Block, ...]:
    """O+FFN of one row: one ELF of eight launches, or three where that does not fit."""
    if ffn_form(config) == "split":
        return _split(config)
    return (_merged(config),)


def _merged(config: ModelConfig) -> Block:
    c = device_config(config)
    e, q, h = c.emb_dim, c.q_dim, c.hidden_dim
    eps = norm_eps(config.emb_dim, e, config.rms_eps)
    up_gemv, add = kernels.gemv(h, e), kernels.eltwise_add(e)
    buffers = [
        given("attn", q),
        static("wo", e, q),
        inner("proj", e),
        *_bias_buffers(config),
        given("residual", e),
        inner("res1", e),
        static("ffn_norm_w", e),
        inner("normed", e),
        static("w_gate", h, e),
        inner("gate", h),
        static("w_up", h, e),
        inner("up", h),
        inner("swiglu", h),
        static("w_down", e, h),
        inner("down", e),
        result("out", e),
    ]
    steps = [
        Step("o_gemv", kernels.gemv(e, q), {"w": "wo", "x": "attn", "out": "proj"}),
        *_bias_steps(config),
        Step("res_add", add, {"a": projected(config), "b": "residual", "out": "res1"}),
        Step("ffn_rms", kernels.rms_norm(1, e, eps), {"x": "res1", "w": "ffn_norm_w", "out": "normed"}),
        Step("gate_gemv", up_gemv, {"w": "w_gate", "x": "normed", "out": "gate"}),
        Step("up_gemv", up_gemv, {"w": "w_up", "x": "normed", "out": "up"}),
        Step("silu_mul", kernels.silu_mul(h), {"gate": "gate", "up": "up", "out": "swiglu"}),
        Step("down_gemv", kernels.gemv(e, h), {"w": "w_down", "x": "swiglu", "out": "down"}),
        Step("ffn_add", add, {"a": "down", "b": "res1", "out": "out"}),
    ]
    return make_block("o_gemv_ffn", buffers, steps)


def _bias_buffers(config: ModelConfig) -> tuple[Buffer, ...]:
    e = device_config(config).emb_dim
    return (static("bo", e), inner("proj_biased", e)) if config.o_bias else ()


def _bias_steps(config: ModelConfig) -> tuple[Step, ...]:
    if not config.o_bias:
        return ()
    spec = kernels.eltwise_add(device_config(config).emb_dim)
    return (Step("o_bias", spec, {"a": "proj", "b": "bo", "out": "proj_biased"}),)


def _split(config: ModelConfig) -> tuple[Block, ...]:
    c = device_config(config)
    e, q, h = c.emb_dim, c.q_dim, c.hidden_dim
    eps = norm_eps(config.emb_dim, e, config.rms_eps)
    add, up_gemv = kernels.eltwise_add(e), kernels.gemv(h, e)
    output = make_block(
        "o_gemv_res_norm",
        [
            given("attn", q),
            static("wo", e, q),
            inner("proj", e),
            *_bias_buffers(config),
            given("residual", e),
            result("res1", e),
            static("ffn_norm_w", e),
            result("normed", e),
        ],
        [
            Step("o_gemv", kernels.gemv(e, q), {"w": "wo", "x": "attn", "out": "proj"}),
            *_bias_steps(config),
            Step("res_add", add, {"a": projected(config), "b": "residual", "out": "res1"}),
            Step("ffn_rms", kernels.rms_norm(1, e, eps), {"x": "res1", "w": "ffn_norm_w", "out": "normed"}),
        ],
    )
    gates = make_block(
        "gate_up_gemv",
        [
            given("normed", e),
            static("w_gate", h, e),
            inner("gate", h),
            static("w_up", h, e),
            inner("up", h),
            result("swiglu", h),
        ],
        [
            Step("gate_gemv", up_gemv, {"w": "w_gate", "x": "normed", "out": "gate"}),
            Step("up_gemv", up_gemv, {"w": "w_up", "x": "normed", "out": "up"}),
            Step("silu_mul", kernels.silu_mul(h), {"gate": "gate", "up": "up", "out": "swiglu"}),
        ],
    )
    buffers, steps = _gemv_in_slices("down", e, h, "swiglu")
    down = make_block(
        "down_gemv_add",
        [given("swiglu", h), *buffers, given("res1", e), result("out", e)],
        [*steps, Step("ffn_add", add, {"a": "down", "b": "res1", "out": "out"})],
    )
    return output, gates, down


def _gemv_in_slices(out: str, rows: int, k: int, x: str) -> tuple[list[Buffer], list[Step]]:
    """`out` = w_`out` [rows, k] x `x`: one GEMV, or the sum of one per slice of columns (`gemv_slices`)."""
    slices = gemv_slices(rows, k)
    if len(slices) == 1:
        operands = {"w": f"w_{out}", "x": x, "out": out}
        return [static(f"w_{out}", rows, k), inner(out, rows)], [
            Step(f"{out}_gemv", kernels.gemv(rows, k), operands)
        ]
    buffers: list[Buffer] = []
    steps: list[Step] = []
    for number, part in enumerate(slices):
        width = part.stop - part.start
        buffers += [static(f"w_{out}{number}", rows, width), inner(f"{out}{number}", rows)]
        columns = OperandRef(x, part.start, (width,))
        steps.append(
            Step(
                f"{out}_gemv{number}",
                kernels.gemv(rows, width),
                {"w": f"w_{out}{number}", "x": columns, "out": f"{out}{number}"},
            )
        )
    total = f"{out}0"
    for number in range(1, len(slices)):
        target = out if number == len(slices) - 1 else f"{out}_sum{number}"
        buffers.append(inner(target, rows))
        operands = {"a": total, "b": f"{out}{number}", "out": target}
        steps.append(Step(f"{out}_sum{number}", kernels.eltwise_add(rows), operands))
        total = target
    return buffers, steps


# Rows of one LM-head partition that every published K allows (mlir-air kernel registry).
PARTITION_ROWS = 16384


# Launches of one ELF that the compiler's stack holds (npu_twin.constraints, rule M6).
MOST_PARTITIONS = 10


def _partition_rows(vocab: int) -> int:
    """Multiples of PARTITION_ROWS for a vocabulary that takes more partitions than one ELF has launches."""
    return PARTITION_ROWS * -(-vocab // (PARTITION_ROWS * MOST_PARTITIONS))


def lm_head_gemv(config: ModelConfig, partition_rows: int | None = None) -> Block:
    """LM head over vocabulary partitions, the last one zero-padded."""
    c = device_config(config)
    if partition_rows is None:
        partition_rows = min(_partition_rows(c.vocab_size), -(-c.vocab_size // 64) * 64)
    spec = kernels.gemv(partition_rows, c.emb_dim)
    buffers, steps = [given("x", c.emb_dim)], []
    for p in range(-(-c.vocab_size // partition_rows)):
        buffers += [static(f"w{p}", partition_rows, c.emb_dim), result(f"logits{p}", partition_rows)]
        steps.append(Step(f"lm_head{p}", spec, {"w": f"w{p}", "x": "x", "out": f"logits{p}"}))
    return make_block("lm_head_gemv", buffers, steps)
