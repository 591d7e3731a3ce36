"""Prefill ELFs of the Llama family. Names and argument order follow the mlir-air LLM examples (e972f2942).

Variants come from the configuration: QKV bias between projection and RoPE, per-head norm between
projection and RoPE, O+FFN in one, two or five ELFs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from . import kernels
from .block import Arrays, Block, Step, given, inner, make_block, result, static
from .device_config import attends_on_device, device_config, ffn_form, norm_eps
from .model_config import ModelConfig


def qkv_name(config: ModelConfig) -> str:
    """Name of the first ELF of a layer, which says what it holds."""
    if config.qk_norm:
        return "rms_qkv_bias_qknorm_rope" if config.qkv_bias else "rms_qkv_qknorm_rope"
    return "rms_qkv_bias_rope" if config.qkv_bias else "rms_gemms_rope"


def splits_qkv(config: ModelConfig) -> bool:
    """Whether Q, K and V take two ELFs: bias and per-head norm together are 11 launches, and the compiler's
    stack holds 10 (npu_twin.constraints, rule M6).
    """
    return config.qkv_bias and config.qk_norm


def split_at(block: Block, label: str, names: tuple[str, str]) -> tuple[Block, Block]:
    """The same steps as two ELFs, the second from step `label` on; what passes between visits the host."""
    place = [step.label for step in block.steps].index(label)
    parts = (block.steps[:place], block.steps[place:])
    written = [{step.names["out"] for step in steps} for steps in parts]
    used = [{name for step in steps for name in step.names.values()} for steps in parts]
    crossing = written[0] & used[1]
    first = tuple(
        replace(buffer, role="output") if buffer.name in crossing else buffer
        for buffer in block.buffers
        if buffer.name in used[0]
    )
    second = tuple(
        replace(buffer, role="input") if buffer.name in crossing else buffer
        for buffer in block.buffers
        if buffer.name in used[1]
    )
    return Block(names[0], first, parts[0]), Block(names[1], second, parts[1])


def qkv(config: ModelConfig, seq_len: int) -> tuple[Block, ...]:
    """Everything of a layer before attention, in one ELF or two."""
    block = rms_gemms_rope(config, seq_len)
    return split_at(block, "q_norm", ("rms_qkv_bias", "qknorm_rope")) if splits_qkv(config) else (block,)


def rms_gemms_rope(config: ModelConfig, seq_len: int) -> Block:
    """First ELF of a layer: RMSNorm, Q/K/V, bias and per-head norm where the model has them, RoPE."""
    c = device_config(config)
    s, e, d = seq_len, c.emb_dim, c.head_dim
    eps = norm_eps(config.emb_dim, e, config.rms_eps)
    widths = {"q": c.q_dim, "k": c.kv_dim, "v": c.kv_dim}
    heads = {"q": c.n_heads, "k": c.n_kv_heads}
    buffers = [given("x", s, e), static("norm_w", e), inner("normed", s, e)]
    steps = [Step("rms", kernels.rms_norm(s, e, eps), {"x": "x", "w": "norm_w", "out": "normed"})]
    for name, width in widths.items():
        make = result if name == v_name(config) else inner
        buffers += [static(f"w{name}", e, width), make(name, s, width)]
        spec = kernels.gemm(s, e, width)
        steps.append(Step(f"{name}_gemm", spec, {"a": "normed", "b": f"w{name}", "out": name}))
    if config.qkv_bias:
        for name, width in widths.items():
            out = f"{name}_biased"
            make = result if name == "v" else inner
            buffers += [static(f"b{name}", width), make(out, s, width)]
            spec = kernels.bias_add(s, width)
            steps.append(Step(f"{name}_bias", spec, {"x": name, "bias": f"b{name}", "out": out}))
    if config.qk_norm:
        head_eps = norm_eps(config.head_dim, d, config.rms_eps)
        for name, count in heads.items():
            source = f"{name}_biased" if config.qkv_bias else name
            buffers += [static(f"{name}_norm_w", d), inner(f"{name}_normed", s, widths[name])]
            spec = kernels.rms_norm(s * count, d, head_eps)
            operands = {"x": source, "w": f"{name}_norm_w", "out": f"{name}_normed"}
            steps.append(Step(f"{name}_norm", spec, operands))
    for name, count in heads.items():
        buffers.append(static(f"table_{name}", s * count, d))
    for name, count in heads.items():
        buffers.append(result(f"{name}_roped", s, widths[name]))
        operands = {"x": before_rope(config, name), "table": f"table_{name}", "out": f"{name}_roped"}
        steps.append(Step(f"rope_{name}", kernels.rope(s * count, d), operands))
    return make_block(qkv_name(config), buffers, steps)


def before_rope(config: ModelConfig, name: str) -> str:
    """Buffer that holds a projection when bias and per-head norm are done."""
    if config.qk_norm:
        return f"{name}_normed"
    return f"{name}_biased" if config.qkv_bias else name


def projected(config: ModelConfig) -> str:
    """Name of the output projection when its bias is added, where the model has one."""
    return "proj_biased" if config.o_bias else "proj"


def v_name(config: ModelConfig) -> str:
    """Name of the value output of the first ELF."""
    return "v_biased" if config.qkv_bias else "v"


def flash_attn(config: ModelConfig, seq_len: int) -> tuple[Block, ...]:
    """Second ELF: causal attention; never merged with others (it owns channels and cascade).

    Empty for head sizes without a device kernel: the host attends then.

    head_dim 64 reads the projections as they are; 128 wants heads first, which the host arranges because
    the DMA cannot transpose bf16.
    """
    if not attends_on_device(config):
        return ()
    c = device_config(config)
    s, q, kv = seq_len, c.q_dim, c.kv_dim
    spec = kernels.flash_attention(s, c.head_dim, c.n_heads, c.n_kv_heads)
    operands = {name: name for name in ("q", "k", "v")}
    if spec.method == "seq_first":
        buffers = [given("q", s, q), given("k", s, kv), given("v", s, kv), result("attn", s, q)]
        return (make_block("flash_attn", buffers, [Step("attn", spec, {**operands, "out": "attn"})]),)
    shapes = {name: sig.shape for name, sig in spec.signature().items()}
    buffers = [given(name, *shapes[name]) for name in ("q", "k", "v")] + [result("attn", *shapes["out"])]
    d, dv_tile = c.head_dim, shapes["v"][2]

    def pack(arrays: Arrays) -> Arrays:
        k_heads = arrays["k"].reshape(s, c.n_kv_heads, d).transpose(1, 0, 2)
        q_heads = arrays["q"].reshape(s, c.n_heads, d).transpose(1, 0, 2)
        v_heads = arrays["v"].reshape(s, c.n_kv_heads * (d // dv_tile), dv_tile).transpose(1, 0, 2)
        return {name: np.ascontiguousarray(a) for name, a in (("q", q_heads), ("k", k_heads), ("v", v_heads))}

    def unpack(arrays: Arrays) -> Arrays:
        return {"attn": np.ascontiguousarray(arrays["attn"].transpose(1, 0, 2)).reshape(s, q)}

    steps = [Step("attn", spec, {**operands, "out": "attn"})]
    return (make_block("flash_attn", buffers, steps, pack=pack, unpack=unpack),)


def ffn(config: ModelConfig, seq_len: int) -> tuple[Block, ...]:
    """Output projection, residual, RMSNorm, SwiGLU feed-forward, residual: one, two or five ELFs."""
    head, gates, swiglu, down = _ffn_parts(config, seq_len)
    form = ffn_form(config)
    if form == "merged":
        return (_join("o_ffn", (*head, *gates, swiglu, *down), outputs=("out",)),)
    if form == "head_down":
        return (
            _join("o_ffn_head", (*head, *gates, swiglu), outputs=("res1", "swiglu")),
            _join("down_add", down, outputs=("out",)),
        )
    return (
        _join("o_res_norm", head, outputs=("res1", "normed")),
        _join("gate", gates[:1], outputs=("gate",)),
        _join("up", gates[1:], outputs=("up",)),
        _join("swiglu", (swiglu,), outputs=("swiglu",)),
        _join("down_add", down, outputs=("out",)),
    )


# A step with the buffers it brings, in the argument order of the published ELF.
_Part = tuple[Step, tuple[tuple[str, tuple[int, ...]], ...]]


def _ffn_parts(
    config: ModelConfig, s: int
) -> tuple[tuple[_Part, ...], tuple[_Part, ...], _Part, tuple[_Part, ...]]:
    c = device_config(config)
    e, q, h = c.emb_dim, c.q_dim, c.hidden_dim
    eps = norm_eps(config.emb_dim, e, config.rms_eps)
    up_gemm, add = kernels.gemm(s, e, h), kernels.eltwise_add(s * e)
    rows, wide = (s, e), (s, h)
    norm = Step("ffn_rms", kernels.rms_norm(s, e, eps), {"x": "res1", "w": "ffn_norm_w", "out": "normed"})
    bias: tuple[_Part, ...] = ()
    if config.o_bias:
        operands = {"x": "proj", "bias": "bo", "out": "proj_biased"}
        step = Step("o_bias", kernels.bias_add(s, e), operands)
        bias = ((step, (("bo", (e,)), ("proj_biased", rows))),)
    head = (
        (
            Step("o_gemm", kernels.gemm(s, q, e), {"a": "attn", "b": "wo", "out": "proj"}),
            (("attn", (s, q)), ("wo", (q, e)), ("proj", rows)),
        ),
        *bias,
        (
            Step("res_add", add, {"a": projected(config), "b": "residual", "out": "res1"}),
            (("residual", rows), ("res1", rows)),
        ),
        (norm, (("ffn_norm_w", (e,)), ("normed", rows))),
    )
    gates = tuple(
        (
            Step(f"{name}_gemm", up_gemm, {"a": "normed", "b": f"w_{name}", "out": name}),
            ((f"w_{name}", (e, h)), (name, wide)),
        )
        for name in ("gate", "up")
    )
    swiglu = (
        Step("silu_mul", kernels.silu_mul(s * h), {"gate": "gate", "up": "up", "out": "swiglu"}),
        (("swiglu", wide),),
    )
    down = (
        (
            Step("down_gemm", kernels.gemm(s, h, e), {"a": "swiglu", "b": "w_down", "out": "down"}),
            (("w_down", (h, e)), ("down", rows)),
        ),
        (Step("ffn_add", add, {"a": "down", "b": "res1", "out": "out"}), (("out", rows),)),
    )
    return head, gates, swiglu, down


def _join(name: str, parts: tuple[_Part, ...], outputs: tuple[str, ...]) -> Block:
    """A block of these parts; what no part writes and no weight is comes from outside."""
    shapes: dict[str, tuple[int, ...]] = {}
    written = {step.names["out"] for step, _ in parts}
    for step, brought in parts:
        shapes.update(brought)
        for operand, buffer in step.names.items():
            shapes.setdefault(buffer, step.spec.signature()[operand].shape)
    makers = {
        key: result
        if key in outputs
        else inner
        if key in written
        else static
        if key.startswith("w") or key.endswith("norm_w") or key == "bo"
        else given
        for key in shapes
    }
    buffers = [makers[key](key, *shape) for key, shape in shapes.items()]
    return make_block(name, buffers, [step for step, _ in parts])
