"""Attention: the FlashAttention cascade kernel of prefill, and f32 on the host for decode.

The kernel keeps its running maximum, denominator and output in bf16, rounds every operation to nearest even,
takes both products in block floating point, replaces 2**x by 2**i * (1 + f) and the division by an integer
seed with two Newton steps (constants of Xilinx/mlir-air e972f2942, attn_npu2.cc; the linear exponential is
described in AMD's public AIE-ML v2 intrinsics guide).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from llms.verify.reference.arithmetic import sums
from llms.verify.reference.arithmetic.description import AttentionArithmetic
from llms.verify.reference.arithmetic.products import BLOCK, block_quantise, power_of_two

_LOWEST = torch.finfo(torch.bfloat16).min
_FRACTION = 9
_SEED = 0x7EB5
_NEWTON = (1.9395974, 1.436142)


def exp2_linear(x: Any) -> Any:
    """2**x of the exponential unit: argument to 9 fraction bits, mantissa linear and cut to 7; bf16.

    Below the normal range the result is zero.
    """
    fixed = torch.round(x.double().clamp(-1000.0, 1000.0) * 2**_FRACTION)
    whole = torch.floor(fixed / 2**_FRACTION)
    mantissa = torch.floor((fixed - whole * 2**_FRACTION) / 2 ** (_FRACTION - 7))
    value = (1.0 + mantissa / 128.0) * power_of_two(whole.clamp(-126, 127))
    value = torch.where(whole < -126, torch.zeros_like(value), value)
    value = torch.where(whole > 127, torch.full_like(value, float("inf")), value)
    return value.to(torch.bfloat16)


def reciprocal(x: Any) -> Any:
    """1/x of positive bf16: integer seed, then two Newton steps, each operation rounded to bf16."""
    b16 = torch.bfloat16
    y = (_SEED - x.view(torch.int16)).view(b16)
    c1, c2 = (torch.tensor(value, dtype=b16).float() for value in _NEWTON)
    first = (c2 - x.float() * y.float()).to(b16)
    y = ((c1 * y.float()).to(b16).float() * first.float()).to(b16)
    second = (1.0 - x.float() * y.float()).to(b16)
    return (y.float() + y.float() * second.float()).to(b16)


def _mul(a: Any, b: Any) -> Any:
    return (a.float() * b.float()).to(torch.bfloat16)


def _add(a: Any, b: Any) -> Any:
    return (a.float() + b.float()).to(torch.bfloat16)


def flash(q: Any, k: Any, v: Any, hidden: Any, how: AttentionArithmetic) -> Any:
    """Attention of ``q[H, n, d]`` over ``k, v[KV, n, d]`` (bf16, n a multiple of 8); bf16 ``[H, n, d]``.

    Query head h reads K/V head h // (H / KV). ``hidden[n, n]`` is true where a query must not see a key.
    Keys from n to ``how.length`` are hidden from all queries and change nothing; they only decide which stage
    a key belongs to.

    Raises:
        ValueError: more keys than the kernel was compiled for, or n is no multiple of 8.
    """
    n = q.shape[1]
    if n > how.length or n % BLOCK:
        raise ValueError(
            f"{n} keys for a kernel compiled for {how.length}: at most that, in blocks of {BLOCK}"
        )
    kernel = _Flash(q, k, v, hidden, how)
    later: tuple[Any, Any, Any] | None = None
    share = how.length // how.stages
    for stage in range(how.stages - 1, -1, -1):
        if stage * share >= n:
            continue
        own = kernel.stage(range(stage * share, min(n, (stage + 1) * share), how.chunk))
        later = own if later is None else kernel.merge(own, later)
    assert later is not None
    _, total, output = later
    return _mul(output, reciprocal(total).unsqueeze(-1))


class _Flash:
    """One call of the kernel: quantised operands and the state updates of its stages."""

    def __init__(self, q: Any, k: Any, v: Any, hidden: Any, how: AttentionArithmetic) -> None:
        group = q.shape[0] // k.shape[0]
        self.how, self.d = how, q.shape[2]
        self.q = block_quantise(q.float())
        self.k = block_quantise(k.float()).repeat_interleave(group, 0)
        by_key = block_quantise(v.float().transpose(1, 2).contiguous())
        self.v = by_key.transpose(1, 2).repeat_interleave(group, 0)
        self.mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
        scale = torch.tensor(math.log2(math.e) / math.sqrt(self.d)).to(torch.bfloat16)
        self.scale = scale.float()

    def exp2(self, difference: Any) -> Any:
        """2**(difference * log2(e) / sqrt(d)), the factor rounded to bf16, the product f32."""
        return exp2_linear(difference.float() * self.scale)

    def score(self, keys: slice) -> Any:
        """bf16 ``[H, n, chunk]``: rounded after every ``depth`` along head_dim, masked."""
        total: Any = None
        for at in range(0, self.d, self.how.depth):
            part = slice(at, at + self.how.depth)
            product = sums.batched(self.q[:, :, part], self.k[:, keys, part])
            total = (product if total is None else product + total.float()).to(torch.bfloat16)
        return (total.float() + self.mask[:, keys]).to(torch.bfloat16)

    def stage(self, starts: range) -> tuple[Any, Any, Any]:
        """Maximum and denominator ``[H, n]``, output ``[H, n, d]`` over the chunks that begin there."""
        heads, n, d = self.q.shape
        maximum = torch.full((heads, n), _LOWEST, dtype=torch.bfloat16)
        total = torch.zeros(heads, n, dtype=torch.bfloat16)
        output = torch.zeros(heads, n, d, dtype=torch.bfloat16)
        for start in starts:
            keys = slice(start, min(n, start + self.how.chunk))
            score = self.score(keys)
            new = torch.maximum(maximum, score.amax(-1))
            p = self.exp2((score.float() - new.unsqueeze(-1).float()).to(torch.bfloat16))
            fade = self.exp2((maximum.float() - new.float()).to(torch.bfloat16))
            total = _add(_mul(total, fade), sums.last_axis(p).to(torch.bfloat16))
            product = sums.batched(block_quantise(p.float()), self.v[:, keys].transpose(1, 2))
            output = (product + _mul(output, fade.unsqueeze(-1)).float()).to(torch.bfloat16)
            maximum = new
        return maximum, total, output

    def merge(self, own: tuple[Any, Any, Any], later: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """Join the state of a stage with that of the stages after it."""
        new = torch.maximum(own[0], later[0])
        mine, theirs = (self.exp2((m.float() - new.float()).to(torch.bfloat16)) for m in (own[0], later[0]))
        total = _add(_mul(own[1], mine), _mul(later[1], theirs))
        output = _add(_mul(own[2], mine.unsqueeze(-1)), _mul(later[2], theirs.unsqueeze(-1)))
        return new, total, output


def host_attention(q: Any, k: Any, v: Any, hidden: Any | None) -> Any:
    """f32 softmax attention with one cast at the end; shapes as in :func:`flash`, ``k`` may be longer."""
    group = q.shape[0] // k.shape[0]
    keys, values = (t.float().repeat_interleave(group, 0) for t in (k, v))
    score = sums.batched(q, keys) / math.sqrt(q.shape[2])
    if hidden is not None:
        score = score.masked_fill(hidden, float("-inf"))
    weights = sums.exponential(score - score.amax(-1, keepdim=True))
    weights = weights / sums.last_axis(weights).unsqueeze(-1)
    return sums.batched(weights, values.transpose(1, 2)).to(torch.bfloat16)
