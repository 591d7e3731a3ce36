"""FlashAttention as the cascade kernel computes it (Xilinx/mlir-air e972f2942, attn_npu2.cc).

The keys are split evenly over the cascade stages, and each stage walks its share in chunks of ``lkp`` keys,
carrying running maximum, denominator and output in bf16. The stages then merge from the last to the first.
Every float operation rounds to bf16; both matrix products use block floating point.

Queries are the columns here, so all passes run along contiguous memory: one column per (query, head of the
group that shares a K/V head), query-major. In causal attention, chunk c concerns the columns of its queries
onward only. For the others the chunk is fully masked and would change nothing (maximum kept, factor 2**0 = 1,
every probability zero), so it is skipped, provided that operands are finite and scores cannot overflow:
otherwise NaN * 0 would show, and nothing is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fixed_order.products import gemm
from npu_twin.bf16 import F32, NEAREST_EVEN, U16, nearest_even, widen
from npu_twin.datapath._steps import Step, as_bf16
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.blockfloat import check_blocked, quantise_
from npu_twin.datapath.tables import exp2_table
from npu_twin.listing import Launch
from npu_twin.memory import OperandView
from npu_twin.ops.flash_attention import passes

LOWEST_BITS = 0xFF7F0000
"""Most negative finite bf16, as f32: where the running maximum starts."""

RECIPROCAL_SEED = 0x7EB5
RECIPROCAL_C1 = 1.9395974
RECIPROCAL_C2 = 1.436142

_COLUMNS = 1024
_BATCH_COLUMNS = 3072


class _Bf16Ops:
    """bf16 arithmetic of one core: an f32 operation, then one rounding."""

    def __init__(self, rounding: str) -> None:
        self.nearest = rounding == NEAREST_EVEN

    def cast(self, x: Any) -> Any:
        """bf16 tensor of an f32 tensor."""
        if self.nearest:
            return x.bfloat16()
        u = x.contiguous().view(torch.int32)
        return ((u + ((u >> 31) & 0xFFFF)) >> 16).to(torch.int16).view(torch.bfloat16)

    def add(self, a: Any, b: Any) -> Any:
        """a + b."""
        return a + b if self.nearest else self.cast(a.float() + b.float())

    def sub(self, a: Any, b: Any) -> Any:
        """a - b."""
        return a - b if self.nearest else self.cast(a.float() - b.float())

    def mul(self, a: Any, b: Any) -> Any:
        """a * b."""
        return a * b if self.nearest else self.cast(a.float() * b.float())


class _Geometry:
    """Checked sizes of one attention launch."""

    def __init__(self, launch: Launch) -> None:
        d = launch.dims
        self.lq, self.lk, self.hd = d["lq"], d["lk"], d["head_dim"]
        self.heads, self.kv_heads = d["q_heads"], d["kv_heads"]
        self.chunk = launch.tile.get("lkp", 64)
        self.stages = int(launch.attrs.get("num_cascade_stages", 4))
        self.causal = bool(launch.attrs.get("causal", False))
        where = f"launch {launch.name}"
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{where}: {self.heads} query heads do not share {self.kv_heads} K/V heads evenly"
            )
        if self.stages < 1 or self.lk % (self.chunk * self.stages):
            raise ValueError(
                f"{where}: lk={self.lk} is not a multiple of {self.stages} cascade stages x lkp={self.chunk}"
            )
        if self.causal and self.lq != self.lk:
            raise ValueError(f"{where}: causal attention needs lq == lk, got {self.lq} and {self.lk}")
        self.depth = min(self.chunk, self.hd)
        if self.hd % self.depth:
            raise ValueError(f"{where}: head_dim={self.hd} is not a multiple of the depth chunk {self.depth}")
        check_blocked(self.depth, f"{where}: the depth chunk")
        check_blocked(self.chunk, f"{where}: lkp")
        self.group = self.heads // self.kv_heads
        self.per_stage = self.lk // self.chunk // self.stages


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """Attention of all heads: q, k, v -> out, layouts ``seq_first`` and ``head_first`` (see the listing)."""
    g = _Geometry(launch)
    q, k, v, out = _by_head(launch.method, g, operands)
    kernel = _Kernel(g, choice, choice.rounding_of(launch.rounding))

    def run() -> None:
        skip = g.causal and _is_tame(q, k, v, g.hd)
        for first in range(0, g.kv_heads, kernel.batch):
            part = slice(first, first + kernel.batch)
            kernel.run_heads(q[part], k[part], v[part], out[part], skip)

    return run


def _by_head(method: str, g: _Geometry, operands: Mapping[str, OperandView]) -> tuple[Any, Any, Any, Any]:
    """Views q[kv, lq, group, hd], k[kv, lk, hd], v[kv, lk, hd'...], out like q, whatever the layout."""
    q, k, v, out = (as_bf16(operands[name].u16) for name in ("q", "k", "v", "out"))
    if method == "seq_first":

        def heads(t: Any) -> Any:
            return t.view(g.lq, g.kv_heads, g.group, g.hd).permute(1, 0, 2, 3)

        k, v = (t.view(g.lk, g.kv_heads, g.hd).permute(1, 0, 2) for t in (k, v))
        return heads(q), k, v.unsqueeze(2), heads(out).unsqueeze(3)
    width = v.shape[2]
    chunks = g.hd // width
    v = v.view(g.kv_heads, chunks, g.lk, width).permute(0, 2, 1, 3)
    out = out.view(g.kv_heads, g.group, chunks, g.lq, width).permute(0, 3, 1, 2, 4)
    return q.view(g.kv_heads, g.group, g.lq, g.hd).permute(0, 2, 1, 3), k, v, out


def _is_tame(q: Any, k: Any, v: Any, depth: int) -> bool:
    """Whether all values are finite and no score can overflow (a NaN fails the comparisons)."""
    q_max, k_max, v_max = (float(t.abs().amax()) for t in (q, k, v))
    return 4 * depth * q_max * k_max < 3e38 and v_max < 1e36 and q_max < 1e38 and k_max < 1e38


@dataclass
class _State:
    """What a stage carries, for the columns from ``low`` on: bf16 maximum, denominator and the last chunk's
    factor for what came before it [heads, columns], output [heads, head_dim, columns].
    """

    low: int
    maximum: Any
    denominator: Any
    fade: Any
    output: Any

    @classmethod
    def empty(cls, low: int, batch: int, depth: int, columns: int) -> _State:
        """State before the first chunk; what it holds is not read."""
        first, second, third = (torch.zeros(batch, columns, dtype=torch.bfloat16) for _ in range(3))
        return cls(low, first, second, third, torch.zeros(batch, depth, columns, dtype=torch.bfloat16))

    def arrays(self) -> tuple[U16, ...]:
        """Bits of maximum, denominator, fade and output."""
        return tuple(_bits(x) for x in (self.maximum, self.denominator, self.fade, self.output))


def _bits(x: Any) -> U16:
    """Bits of a bf16 tensor, on the same memory."""
    found: U16 = x.view(torch.int16).numpy().view(np.uint16)
    return found


def _product(a: Any, b: Any) -> Any:
    """f32 [B, M, N]: a[B, K, M]^T @ b[B, K, N], summed along K upward."""
    out = torch.empty(a.shape[0], a.shape[2], b.shape[2])
    gemm(a.numpy(), b.numpy(), out.numpy())
    return out


class _Kernel:
    """The computation for a batch of K/V heads, each with the group of query heads that share it."""

    def __init__(self, g: _Geometry, choice: Arithmetic, rounding: str) -> None:
        self.g = g
        self.choice = choice
        self.ops = _Bf16Ops(rounding)
        self.rounding = rounding
        scale = float(widen(nearest_even(np.float32(math.log2(math.e) / math.sqrt(g.hd)))))
        self.table = exp2_table(scale, choice.exp2)
        self.tile = min(g.lq, max(g.chunk, _COLUMNS // g.group // g.chunk * g.chunk))
        self.batch = max(1, _BATCH_COLUMNS // (self.tile * g.group))

    def run_heads(self, q: Any, k: Any, v: Any, out: Any, skip: bool) -> None:
        """q[B, lq, group, hd], k[B, lk, hd], v[B, lk, chunks, width] -> out[B, lq, group, chunks, width]."""
        g, count = self.g, k.shape[0]
        keys = self._load(k.transpose(1, 2))
        values = self._load(v.reshape(count, g.lk, g.hd))
        for start in range(0, g.lq, self.tile):
            part = q[:, start : start + self.tile]
            queries = self._load(part.permute(0, 3, 1, 2)).view(count, g.hd, -1)
            result = self._tile(queries, keys, values, start, skip)
            shaped = result.view(count, g.hd, part.shape[1], g.group).permute(0, 2, 3, 1)
            target = out[:, start : start + self.tile]
            target.copy_(shaped.unflatten(3, target.shape[3:]))

    def _load(self, source: Any) -> Any:
        """f32 copy in row-major order, block-quantised along the second dimension."""
        wide = torch.empty(source.shape).copy_(source)
        quantise_(wide.view(source.shape[0] * source.shape[1], -1), self.choice)
        return wide

    def _tile(self, queries: Any, keys: Any, values: Any, start: int, skip: bool) -> Any:
        """bf16 [B, hd, columns]: finished output of the query tile that begins at query ``start``."""
        g = self.g
        later: _State | None = None
        for stage in range(g.stages - 1, -1, -1):
            first_key = stage * g.per_stage * g.chunk
            low = max(0, first_key - start) * g.group if skip else 0
            if low >= queries.shape[2]:
                continue
            own = self._stage(queries, keys, values, start, stage, low, skip)
            if later is not None:
                self._merge(own, later)
            later = own
        assert later is not None
        return self.ops.mul(later.output, self._reciprocal(later.denominator).unsqueeze(1))

    def _stage(
        self, queries: Any, keys: Any, values: Any, start: int, stage: int, first: int, skip: bool
    ) -> _State:
        """State of one stage after all its chunks, for the columns from ``first`` on."""
        g = self.g
        state: _State | None = None
        for chunk in range(stage * g.per_stage, (stage + 1) * g.per_stage):
            key = chunk * g.chunk
            low = max(0, key - start) * g.group if skip else first
            if low >= queries.shape[2]:
                break
            span = slice(key, key + g.chunk)
            p = self._score(queries[..., low:], keys[..., span])
            first_chunk = state is None
            if state is None:
                state = _State.empty(low, p.shape[0], g.hd, p.shape[2])
            m, d, fade, acc = (bits[..., low - state.low :] for bits in state.arrays())
            late = key - start - low // g.group if g.causal else -2 * g.chunk
            passes.probabilities(
                p,
                (m, d, fade),
                self.table,
                late,
                g.group,
                first_chunk,
                self.choice,
                self.rounding,
                LOWEST_BITS,
            )
            if self.choice.block_overflow == "saturate":
                quantise_(torch.from_numpy(p).view(-1, p.shape[2]), self.choice, positive=True)
            product = _product(values[:, span], torch.from_numpy(p))
            passes.faded_sum(acc, fade, product.numpy(), first_chunk, self.rounding)
        assert state is not None
        return state

    def _score(self, queries: Any, keys: Any) -> F32:
        """f32 [B, chunk, columns]: Q*K summed in f32 within a depth chunk, rounded to bf16 after each but the
        last.
        """
        score: Any = None
        for at in range(0, self.g.hd, self.g.depth):
            part = slice(at, at + self.g.depth)
            product = _product(keys[:, part], queries[:, part])
            score = product if score is None else product.add_(self.ops.cast(score))
        found: F32 = score.numpy()
        return found

    def _merge(self, own: _State, later: _State) -> None:
        """Take the state of the later stages into ``own``; columns that they never saw stay as they are."""
        ops = self.ops
        m, d, acc = (x[..., later.low - own.low :] for x in (own.maximum, own.denominator, own.output))
        new = torch.maximum(m, later.maximum)
        f_own, f_later = (self._exp2(ops.sub(x, new)).bfloat16() for x in (m, later.maximum))
        d.copy_(ops.add(ops.mul(d, f_own), ops.mul(later.denominator, f_later)))
        passes.merged(_bits(acc), _bits(f_own), _bits(later.output), _bits(f_later), self.rounding)
        m.copy_(new)

    def _exp2(self, difference: Any) -> Any:
        """f32 tensor of bf16 values 2**(difference * log2(e)/sqrt(head_dim)), by table."""
        index = difference.contiguous().view(torch.int16).numpy().view(np.uint16)
        result = np.empty(index.shape, np.float32)
        np.take(self.table, index, out=result, mode="clip")
        return torch.from_numpy(result)

    def _reciprocal(self, x: Any) -> Any:
        """1/x: integer seed and two Newton steps; each multiply-accumulate is f32 and rounds to bf16."""
        if self.choice.reciprocal == "exact":
            return x.float().reciprocal_().bfloat16()
        ops, wide = self.ops, x.float()
        y = (RECIPROCAL_SEED - x.view(torch.int16)).view(torch.bfloat16)
        c1, c2 = (torch.tensor(c, dtype=torch.bfloat16) for c in (RECIPROCAL_C1, RECIPROCAL_C2))
        y = ops.mul(ops.mul(c1, y), ops.cast(c2.float() - wide * y.float()))
        rest = ops.cast(1.0 - wide * y.float())
        return ops.cast(y.float() + y.float() * rest.float())
