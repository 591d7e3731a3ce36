"""What every named result of a layer must be: fp32 reference and the device's arithmetic, from given inputs.

The graph is written down here by the buffer names of the blocks (those of the mlir-air LLM examples), not
read from the deployment's programs: a program that wires `gate` where `up` belongs is wrong here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from ml_dtypes import bfloat16

from llms.verify.contract.records import Array
from llms.verify.localise.checkpoint import Truth
from llms.verify.reference.arithmetic import (
    LinearArithmetic,
    PhaseArithmetic,
    attention,
    elementwise,
    products,
)
from llms.verify.reference.hf import to_numpy, to_torch
from llms.verify.reference.kernels import reference_output

Lookup = Callable[[str], Array]


@dataclass(frozen=True, eq=False)
class Expectation:
    """fp32 reference rounded once, and the matched arithmetic, both in the shape of the device's result."""

    reference: Array
    matched: Array


@dataclass(frozen=True, eq=False)
class Stage:
    """One result of a layer: names of what it is computed from, and how."""

    inputs: tuple[str, ...]
    compute: Callable[..., Expectation]


class Stages:
    """Expected results of one layer of one phase.

    rows: rows of the activations. table: rotary rows bf16 [rows, head_dim], one per position.
    """

    def __init__(self, truth: Truth, arithmetic: PhaseArithmetic, layer: int, table: Array) -> None:
        self.truth = truth
        self.how = arithmetic
        self.layer = layer
        self.weights = truth.weights.layers[layer]
        self.table = table
        self.value = "v_biased" if "bv" in self.weights else "v"
        """Name of V as attention reads it."""
        self._graph = self._stages()
        self._parts = self._down_parts()

    def names(self) -> tuple[str, ...]:
        """Results that a layer must produce, in order."""
        return tuple(self._graph)

    def expect(self, name: str, get: Lookup, shape: tuple[int, ...]) -> Expectation:
        """Expectation of one result from its inputs. Raises KeyError for an input that does not exist."""
        stage = self._graph.get(name) or self._parts[name]
        expected = stage.compute(*(get(source) for source in stage.inputs))
        return Expectation(*(np.asarray(a).reshape(shape) for a in (expected.reference, expected.matched)))

    def _stages(self) -> dict[str, Stage]:
        """The data flow of a Llama layer, with the biases and norms per head that the checkpoint has."""
        w = self.weights
        biased = {name: f"{name}_biased" if f"b{name}" in w else name for name in "qkv"}
        normed = {name: f"{name}_normed" if f"{name}_norm" in w else biased[name] for name in "qk"}
        proj = "proj_biased" if "bo" in w else "proj"
        norm = partial(self._norm, weight=w["attn_norm"], eps=self.truth.eps, role="input_norm")
        stages = {"attn_normed": Stage(("x",), norm)}
        for name in "qkv":
            stages[name] = self._linear(f"w{name}", f"{name}_proj", "attn_normed")
        for name in (name for name in "qkv" if f"b{name}" in w):
            stages[f"{name}_biased"] = Stage((name,), partial(self._biased, bias=w[f"b{name}"]))
        for name in (name for name in "qk" if f"{name}_norm" in w):
            norm = partial(self._norm, weight=w[f"{name}_norm"], eps=self.truth.head_eps, role="qk_norm")
            stages[f"{name}_normed"] = Stage((biased[name],), norm)
        for name in "qk":
            stages[f"{name}_roped"] = Stage((normed[name],), self._rope)
        stages["attn"] = Stage(("q_roped", "k_roped", self.value), self.attention)
        stages["proj"] = self._linear("wo", "o_proj", "attn")
        if "bo" in w:
            stages["proj_biased"] = Stage(("proj",), partial(self._biased, bias=w["bo"]))
        norm = partial(self._norm, weight=w["ffn_norm"], eps=self.truth.eps, role="post_norm")
        return {
            **stages,
            "res1": Stage((proj, "residual"), partial(self._add, role="attn_add")),
            "ffn_normed": Stage(("res1",), norm),
            "gate": self._linear("w_gate", "gate_proj", "ffn_normed"),
            "up": self._linear("w_up", "up_proj", "ffn_normed"),
            "swiglu": Stage(("gate", "up"), self._swiglu),
            "down": self._linear("w_down", "down_proj", "swiglu"),
            "out": Stage(("down", "res1"), partial(self._add, role="mlp_add")),
        }

    def _linear(self, weight: str, projection: str, source: str) -> Stage:
        how = self.how.linears[projection]
        return Stage((source,), lambda x: linear(self._rows(x), self.weights[weight], how))

    def _down_parts(self) -> dict[str, Stage]:
        """`down0` and so on: parts of the down projection, where its columns are shared out in slices."""
        how, weight = self.how.linears["down_proj"], self.weights["w_down"]
        whole = replace(how, slices=())
        parts = {}
        for number in range(len(how.slices)):
            columns = slice(sum(how.slices[:number]), sum(how.slices[: number + 1]))

            def part(x: Array, columns: slice = columns) -> Expectation:
                return linear(self._rows(x)[:, columns], weight[:, columns], whole)

            parts[f"down{number}"] = Stage(("swiglu",), part)
        return parts

    def _rows(self, array: Array) -> Array:
        return np.asarray(array).reshape(len(self.table), -1)

    def _norm(self, x: Array, *, weight: Array, eps: float, role: Any) -> Expectation:
        rows = np.asarray(x).reshape(-1, weight.shape[0])
        dims = {"M": rows.shape[0], "N": rows.shape[1]}
        plain = reference_output("rms_norm", {"x": rows, "w": weight}, dims=dims, attrs={"eps": eps})
        near = elementwise.rms_norm(to_torch(rows), to_torch(weight), eps, self.how.rounding(role))
        return Expectation(plain, to_numpy(near))

    def _biased(self, x: Array, *, bias: Array) -> Expectation:
        rows = self._rows(x)
        return self._add(rows, np.broadcast_to(bias, rows.shape), role="bias")

    def _add(self, a: Array, b: Array, *, role: Any) -> Expectation:
        one, two = (np.ascontiguousarray(array).reshape(-1) for array in (a, b))
        plain = reference_output("eltwise_add", {"a": one, "b": two}, dims={"n": one.size})
        return Expectation(
            plain, to_numpy(elementwise.add(to_torch(one), to_torch(two), self.how.rounding(role)))
        )

    def _rope(self, x: Array) -> Expectation:
        d = self.truth.device.head_dim
        rows = np.asarray(x).reshape(-1, d)
        table = np.repeat(self.table, rows.shape[0] // len(self.table), axis=0)
        dims = {"rows": rows.shape[0], "head_dim": d}
        plain = reference_output("rope", {"x": rows, "table": table}, dims=dims, method="half_split")
        cos, sin = (to_torch(np.tile(half, (1, 2))) for half in np.split(table, 2, axis=1))
        return Expectation(
            plain, to_numpy(elementwise.rope(to_torch(rows), cos, sin, self.how.rounding("rope")))
        )

    def _swiglu(self, gate: Array, up: Array) -> Expectation:
        one, two = np.asarray(gate).reshape(-1), np.asarray(up).reshape(-1)
        plain = reference_output("silu_mul", {"gate": one, "up": two}, dims={"n": one.size})
        rounding = self.how.rounding("activation")
        near = elementwise.multiply(elementwise.silu(to_torch(one), rounding), to_torch(two), rounding)
        return Expectation(plain, to_numpy(near))

    def attention(self, q: Array, k: Array, v: Array) -> Expectation:
        """Causal attention over all rows, query head h with K/V head h // (heads / KV heads)."""
        length, sizes = len(self.table), self.truth.sizes
        queries, keys, values = (
            self.truth.split_heads(a.reshape(length, -1), n)
            for a, n in ((q, sizes.n_heads), (k, sizes.n_kv_heads), (v, sizes.n_kv_heads))
        )
        out = plain_attention(queries, keys, values, causal=True)
        hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        one, two, three = (to_torch(a) for a in (queries, keys, values))
        how = self.how.attention
        if how.method == "flash":
            near = attention.flash(one, two, three, hidden, how)
        else:
            near = attention.host_attention(one, two, three, hidden)
        plain, matched = (self.truth.join_heads(a) for a in (out, to_numpy(near)))
        return Expectation(plain.astype(bfloat16), matched)


def linear(x: Array, weight: Array, how: LinearArithmetic) -> Expectation:
    """x[M, K] times weight[N, K]."""
    rows = np.ascontiguousarray(x)
    dims = {"M": rows.shape[0], "K": rows.shape[1], "N": weight.shape[0]}
    plain = reference_output("gemm", {"a": rows, "b": weight.T}, dims=dims)
    if how.blocked:
        near = products.gemm(to_torch(rows), products.quantised_weight(to_torch(weight)), how)
    else:
        near = products.gemv(to_torch(rows), to_torch(weight), how)
    return Expectation(plain, to_numpy(near))


def plain_attention(q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    """fp32 attention of the kernel harness; q [H, n, d], k and v [KV, m, d]."""
    (heads, n, d), (kv, m, _) = q.shape, k.shape
    dims = {"lq": n, "lk": m, "head_dim": d, "q_heads": heads, "kv_heads": kv}
    operands = {"q": q, "k": k, "v": v}
    return reference_output(
        "flash_attention", operands, dims=dims, method="head_first", attrs={"causal": causal}
    )
