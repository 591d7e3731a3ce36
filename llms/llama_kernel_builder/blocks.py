"""Blocks: the per-layer ELFs of the Llama family, merged into one ELF or one ELF per kernel.

A block is a set of named buffers and an ordered list of kernels on them. Argument order and buffer
names follow the mlir-air LLM examples (e972f2942), so an artefact built there binds here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from . import kernels
from .model_config import ModelConfig
from .program import Buffer, Program, leaf_program
from .specs import KernelSpec
from .stitch import Part, stitch


@dataclass(frozen=True)
class Step:
    """One kernel of a block: label, spec, and the block buffer of each operand."""

    label: str
    spec: KernelSpec
    operands: Mapping[str, str]


@dataclass(frozen=True)
class Block:
    """Buffers and kernel sequence of one ELF."""

    name: str
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]

    def merged(self) -> Program:
        """All kernels in one ELF: intermediates stay on the device."""
        parts = [Part(step.label, leaf_program(step.label, step.spec), step.operands) for step in self.steps]
        return stitch(self.name, self.buffers, parts)

    def unmerged(self) -> tuple[Program, ...]:
        """One ELF per kernel, arguments named as the block's buffers: every result visits the host."""
        by_name = {buffer.name: buffer for buffer in self.buffers}
        programs = []
        for step in self.steps:
            signature = step.spec.signature()
            roles = {}
            for operand, name in step.operands.items():
                if signature[operand].written:
                    roles[name] = "intermediate" if operand == "scratch" else "output"
                else:
                    roles[name] = "static" if by_name[name].role == "static" else "input"
            buffers = [replace(by_name[name], role=role) for name, role in roles.items()]
            part = Part(step.label, leaf_program(step.label, step.spec), step.operands)
            programs.append(stitch(f"{self.name}.{step.label}", buffers, [part]))
        return tuple(programs)


def _block(name: str, buffers: Sequence[Buffer], steps: Sequence[Step]) -> Block:
    """Add one f32 scratch argument at the end per fused-cast GEMM, as its second launch needs it."""
    all_buffers = list(buffers)
    all_steps = []
    for step in steps:
        signature = step.spec.signature()
        if "scratch" in signature:
            scratch = f"{step.label}_f32"
            all_buffers.append(Buffer(scratch, signature["scratch"].shape, "f32", "intermediate"))
            step = replace(step, operands={**step.operands, "scratch": scratch})
        all_steps.append(step)
    return Block(name, tuple(all_buffers), tuple(all_steps))


def _input(name: str, *shape: int) -> Buffer:
    return Buffer(name, shape, "bf16", "input")


def _static(name: str, *shape: int) -> Buffer:
    return Buffer(name, shape, "bf16", "static")


def _inner(name: str, *shape: int) -> Buffer:
    return Buffer(name, shape, "bf16", "intermediate")


def _output(name: str, *shape: int) -> Buffer:
    return Buffer(name, shape, "bf16", "output")


def rms_gemms_rope(config: ModelConfig, seq_len: int) -> Block:
    """Prefill, first ELF of a layer: RMSNorm, Q/K/V projections, RoPE on Q and K."""
    s, e, q, kv, d = seq_len, config.emb_dim, config.q_dim, config.kv_dim, config.head_dim
    heads, kv_heads = config.n_heads, config.n_kv_heads
    buffers = [
        _input("x", s, e),
        _static("norm_w", e),
        _inner("normed", s, e),
        _static("wq", e, q),
        _inner("q", s, q),
        _static("wk", e, kv),
        _inner("k", s, kv),
        _static("wv", e, kv),
        _output("v", s, kv),
        _static("table_q", s * heads, d),
        _static("table_k", s * kv_heads, d),
        _output("q_roped", s, q),
        _output("k_roped", s, kv),
    ]
    steps = [
        Step("rms", kernels.rms_norm(s, e, config.rms_eps), {"x": "x", "w": "norm_w", "out": "normed"}),
        Step("q_gemm", kernels.gemm(s, e, q), {"a": "normed", "b": "wq", "out": "q"}),
        Step("k_gemm", kernels.gemm(s, e, kv), {"a": "normed", "b": "wk", "out": "k"}),
        Step("v_gemm", kernels.gemm(s, e, kv), {"a": "normed", "b": "wv", "out": "v"}),
        Step("rope_q", kernels.rope(s * heads, d), {"x": "q", "table": "table_q", "out": "q_roped"}),
        Step("rope_k", kernels.rope(s * kv_heads, d), {"x": "k", "table": "table_k", "out": "k_roped"}),
    ]
    return _block("rms_gemms_rope", buffers, steps)


def flash_attn(config: ModelConfig, seq_len: int) -> Block:
    """Prefill, second ELF: causal attention; never merged with others (it owns channels and cascade)."""
    s, q, kv = seq_len, config.q_dim, config.kv_dim
    spec = kernels.flash_attention(s, config.head_dim, config.n_heads, config.n_kv_heads)
    buffers = [_input("q", s, q), _input("k", s, kv), _input("v", s, kv), _output("attn", s, q)]
    return _block("flash_attn", buffers, [Step("attn", spec, {"q": "q", "k": "k", "v": "v", "out": "attn"})])


def o_ffn(config: ModelConfig, seq_len: int) -> Block:
    """Prefill, third ELF: output projection, residual, RMSNorm, SwiGLU feed-forward, residual."""
    s, e, q, h = seq_len, config.emb_dim, config.q_dim, config.hidden_dim
    up_gemm = kernels.gemm(s, e, h)
    add = kernels.eltwise_add(s * e)
    buffers = [
        _input("attn", s, q),
        _static("wo", q, e),
        _inner("proj", s, e),
        _input("residual", s, e),
        _inner("res1", s, e),
        _static("ffn_norm_w", e),
        _inner("normed", s, e),
        _static("w_gate", e, h),
        _inner("gate", s, h),
        _static("w_up", e, h),
        _inner("up", s, h),
        _inner("swiglu", s, h),
        _static("w_down", h, e),
        _inner("down", s, e),
        _output("out", s, e),
    ]
    steps = [
        Step("o_gemm", kernels.gemm(s, q, e), {"a": "attn", "b": "wo", "out": "proj"}),
        Step("res_add", add, {"a": "proj", "b": "residual", "out": "res1"}),
        Step(
            "ffn_rms",
            kernels.rms_norm(s, e, config.rms_eps),
            {"x": "res1", "w": "ffn_norm_w", "out": "normed"},
        ),
        Step("gate_gemm", up_gemm, {"a": "normed", "b": "w_gate", "out": "gate"}),
        Step("up_gemm", up_gemm, {"a": "normed", "b": "w_up", "out": "up"}),
        Step("silu_mul", kernels.silu_mul(s * h), {"gate": "gate", "up": "up", "out": "swiglu"}),
        Step("down_gemm", kernels.gemm(s, h, e), {"a": "swiglu", "b": "w_down", "out": "down"}),
        Step("ffn_add", add, {"a": "down", "b": "res1", "out": "out"}),
    ]
    return _block("o_ffn", buffers, steps)


def rms_gemv_rope(config: ModelConfig) -> Block:
    """Decode, first ELF of a layer: RMSNorm (f32 sum of squares), Q/K/V, RoPE, one row."""
    e, q, kv, d = config.emb_dim, config.q_dim, config.kv_dim, config.head_dim
    buffers = [
        _input("x", e),
        _static("norm_w", e),
        _inner("normed", e),
        _static("wq", q, e),
        _inner("q", q),
        _static("wk", kv, e),
        _inner("k", kv),
        _static("wv", kv, e),
        _output("v", kv),
        _input("table_q", config.n_heads, d),
        _input("table_k", config.n_kv_heads, d),
        _output("q_roped", q),
        _output("k_roped", kv),
    ]
    steps = [
        Step("rms", kernels.rms_norm(1, e, config.rms_eps), {"x": "x", "w": "norm_w", "out": "normed"}),
        Step("q_gemv", kernels.gemv(q, e), {"w": "wq", "x": "normed", "out": "q"}),
        Step("k_gemv", kernels.gemv(kv, e), {"w": "wk", "x": "normed", "out": "k"}),
        Step("v_gemv", kernels.gemv(kv, e), {"w": "wv", "x": "normed", "out": "v"}),
        Step("rope_q", kernels.rope(config.n_heads, d), {"x": "q", "table": "table_q", "out": "q_roped"}),
        Step("rope_k", kernels.rope(config.n_kv_heads, d), {"x": "k", "table": "table_k", "out": "k_roped"}),
    ]
    return _block("rms_gemv_rope", buffers, steps)


def o_gemv_ffn(config: ModelConfig) -> Block:
    """Decode, second ELF: `o_ffn` on one row, eight launches.

    This form has no K % 512 rule (that one belongs to the cascade GEMV with residual add), so it is
    legal for widths such as 576 where the fused form is not.
    """
    e, q, h = config.emb_dim, config.q_dim, config.hidden_dim
    up_gemv = kernels.gemv(h, e)
    add = kernels.eltwise_add(e)
    buffers = [
        _input("attn", q),
        _static("wo", e, q),
        _inner("proj", e),
        _input("residual", e),
        _inner("res1", e),
        _static("ffn_norm_w", e),
        _inner("normed", e),
        _static("w_gate", h, e),
        _inner("gate", h),
        _static("w_up", h, e),
        _inner("up", h),
        _inner("swiglu", h),
        _static("w_down", e, h),
        _inner("down", e),
        _output("out", e),
    ]
    steps = [
        Step("o_gemv", kernels.gemv(e, q), {"w": "wo", "x": "attn", "out": "proj"}),
        Step("res_add", add, {"a": "proj", "b": "residual", "out": "res1"}),
        Step(
            "ffn_rms",
            kernels.rms_norm(1, e, config.rms_eps),
            {"x": "res1", "w": "ffn_norm_w", "out": "normed"},
        ),
        Step("gate_gemv", up_gemv, {"w": "w_gate", "x": "normed", "out": "gate"}),
        Step("up_gemv", up_gemv, {"w": "w_up", "x": "normed", "out": "up"}),
        Step("silu_mul", kernels.silu_mul(h), {"gate": "gate", "up": "up", "out": "swiglu"}),
        Step("down_gemv", kernels.gemv(e, h), {"w": "w_down", "x": "swiglu", "out": "down"}),
        Step("ffn_add", add, {"a": "down", "b": "res1", "out": "out"}),
    ]
    return _block("o_gemv_ffn", buffers, steps)


def lm_head_gemv(config: ModelConfig, partition_rows: int) -> Block:
    """LM head over vocabulary partitions of `partition_rows` rows, the last one zero-padded."""
    e = config.emb_dim
    count = -(-config.vocab_size // partition_rows)
    spec = kernels.gemv(partition_rows, e)
    buffers = [_input("x", e)]
    steps = []
    for p in range(count):
        buffers += [_static(f"w{p}", partition_rows, e), _output(f"logits{p}", partition_rows)]
        steps.append(Step(f"lm_head{p}", spec, {"w": f"w{p}", "x": "x", "out": f"logits{p}"}))
    return _block("lm_head_gemv", buffers, steps)
