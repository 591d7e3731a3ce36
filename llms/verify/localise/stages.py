"""What every named result of a layer must be: fp32 reference and the device's arithmetic, from given inputs.

The graph is written down here by the buffer names of the blocks (those of the mlir-air LLM examples), not
read from the deployment's programs: a program that wires `gate` where `up` belongs is wrong here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llms.verify.localise.checkpoint import Truth
from llms.verify.reference.arithmetic import LinearArithmetic, PhaseArithmetic
from llms.verify.reference.kernels import reference_output

Array = np.ndarray[Any, Any]
Lookup = Callable[[str], Array]


@dataclass(frozen=True, eq=False)
class Expectation:
    """fp32 reference rounded once, and the matched arithmetic, both in the shape of the device's result."""

    reference: Array
    matched: Array


class Stages:
    """Expected results of one layer of one phase.

    rows: rows of the activations. table: rotary rows bf16 [rows, head_dim], one per position.
    """

    def __init__(self, truth: Truth, arithmetic: PhaseArithmetic, layer: int, table: Array) -> None:
        self.truth = truth
        self.how = arithmetic
        self.layer = layer
        self.weights = truth.named(layer)
        self.table = table

    def names(self) -> tuple[str, ...]:
        """Results that a layer must produce, in order."""
        w = self.weights
        found = ["attn_normed", "q", "k", "v"]
        found += [f"{name}_biased" for name in "qkv" if f"b{name}" in w]
        found += [f"{name}_normed" for name in "qk" if f"{name}_norm" in w]
        found += ["q_roped", "k_roped", "attn", "proj"]
        found += ["proj_biased"] if "bo" in w else []
        return (*found, "res1", "ffn_normed", "gate", "up", "swiglu", "down", "out")

    def before_rope(self, name: str) -> str:
        """What rope of q or k reads."""
        if f"{name}_norm" in self.weights:
            return f"{name}_normed"
        return f"{name}_biased" if f"b{name}" in self.weights else name

    @property
    def value(self) -> str:
        """Name of V as attention reads it."""
        return "v_biased" if "bv" in self.weights else "v"

    def expect(self, name: str, get: Lookup, shape: tuple[int, ...]) -> Expectation:
        """Expectation of one result from its inputs. Raises KeyError for an input that does not exist."""
        found = self._expect(name, get)
        return Expectation(*(np.asarray(a).reshape(shape) for a in (found.reference, found.matched)))

    def _expect(self, name: str, get: Lookup) -> Expectation:
        w = self.weights
        if name in ("attn_normed", "ffn_normed"):
            key, role = ("attn_norm", "input_norm") if name == "attn_normed" else ("ffn_norm", "post_norm")
            source = "x" if name == "attn_normed" else "res1"
            return self._norm(self._rows(get(source)), w[key], self.truth.eps, role)
        if name in ("q", "k", "v"):
            return self._linear(get("attn_normed"), w[f"w{name}"], f"{name}_proj")
        if name == "proj":
            return self._linear(get("attn"), w["wo"], "o_proj")
        if name in ("gate", "up"):
            return self._linear(get("ffn_normed"), w[f"w_{name}"], f"{name}_proj")
        if name == "down" or name.removeprefix("down").isdigit():
            return self._down(name, get)
        if name.endswith("_biased"):
            bias = w["bo" if name == "proj_biased" else f"b{name[0]}"]
            rows = self._rows(get(name.removesuffix("_biased")))
            return self._add(rows, np.broadcast_to(bias, rows.shape), "bias")
        if name.endswith("_normed"):
            source = f"{name[0]}_biased" if f"b{name[0]}" in w else name[0]
            rows = np.asarray(get(source)).reshape(-1, self.truth.device.head_dim)
            return self._norm(rows, w[f"{name[0]}_norm"], self.truth.head_eps, "qk_norm")
        if name.endswith("_roped"):
            return self._rope(get(self.before_rope(name[0])))
        if name == "res1":
            return self._add(get("proj_biased" if "bo" in w else "proj"), get("residual"), "attn_add")
        if name == "out":
            return self._add(get("down"), get("res1"), "mlp_add")
        if name == "swiglu":
            return self._swiglu(get("gate"), get("up"))
        if name == "attn":
            return self.attention(get("q_roped"), get("k_roped"), get(self.value))
        raise KeyError(name)

    def _rows(self, array: Array) -> Array:
        return np.asarray(array).reshape(len(self.table), -1)

    def _linear(self, x: Array, weight: Array, projection: str) -> Expectation:
        return linear(self._rows(x), weight, self.how.linears[projection])

    def _down(self, name: str, get: Lookup) -> Expectation:
        """The down projection, or the part of it (`down0`) that one of its slices of columns gives."""
        how, weight = self.how.linears["down_proj"], self.weights["w_down"]
        x = self._rows(get("swiglu"))
        if name == "down":
            return linear(x, weight, how)
        number = int(name.removeprefix("down"))
        columns = slice(sum(how.slices[:number]), sum(how.slices[: number + 1]))
        return linear(x[:, columns], weight[:, columns], replace(how, slices=()))

    def _norm(self, x: Array, weight: Array, eps: float, role: Any) -> Expectation:
        from llms.verify.reference.arithmetic import elementwise

        dims = {"M": x.shape[0], "N": x.shape[1]}
        plain = reference_output("rms_norm", {"x": x, "w": weight}, dims=dims, attrs={"eps": eps})
        near = elementwise.rms_norm(_torch(x), _torch(weight), eps, self.how.rounding(role))
        return Expectation(plain, _numpy(near))

    def _add(self, a: Array, b: Array, role: Any) -> Expectation:
        from llms.verify.reference.arithmetic import elementwise

        one, two = (np.ascontiguousarray(array).reshape(-1) for array in (a, b))
        plain = reference_output("eltwise_add", {"a": one, "b": two}, dims={"n": one.size})
        return Expectation(plain, _numpy(elementwise.add(_torch(one), _torch(two), self.how.rounding(role))))

    def _rope(self, x: Array) -> Expectation:
        from llms.verify.reference.arithmetic import elementwise

        d = self.truth.device.head_dim
        rows = np.asarray(x).reshape(-1, d)
        table = np.repeat(self.table, rows.shape[0] // len(self.table), axis=0)
        dims = {"rows": rows.shape[0], "head_dim": d}
        plain = reference_output("rope", {"x": rows, "table": table}, dims=dims, method="half_split")
        cos, sin = (_torch(np.tile(half, (1, 2))) for half in np.split(table, 2, axis=1))
        return Expectation(plain, _numpy(elementwise.rope(_torch(rows), cos, sin, self.how.rounding("rope"))))

    def _swiglu(self, gate: Array, up: Array) -> Expectation:
        from llms.verify.reference.arithmetic import elementwise

        one, two = np.asarray(gate).reshape(-1), np.asarray(up).reshape(-1)
        plain = reference_output("silu_mul", {"gate": one, "up": two}, dims={"n": one.size})
        rounding = self.how.rounding("activation")
        near = elementwise.multiply(elementwise.silu(_torch(one), rounding), _torch(two), rounding)
        return Expectation(plain, _numpy(near))

    def attention(self, q: Array, k: Array, v: Array) -> Expectation:
        """Causal attention over all rows, query head h with K/V head h // (heads / KV heads)."""
        import torch

        from llms.verify.reference.arithmetic import attention

        length = len(self.table)
        queries, keys, values = (
            split_heads(a.reshape(length, -1), n, self.truth)
            for a, n in zip((q, k, v), self._heads, strict=True)
        )
        out = plain_attention(queries, keys, values, causal=True)
        hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        one, two, three = (_torch(a) for a in (queries, keys, values))
        how = self.how.attention
        if how.method == "flash":
            near = attention.flash(one, two, three, hidden, how)
        else:
            near = attention.host_attention(one, two, three, hidden)
        merged = [join_heads(a, self.truth) for a in (out, _numpy(near))]
        return Expectation(merged[0].astype(bfloat16), merged[1])

    @property
    def _heads(self) -> tuple[int, int, int]:
        c = self.truth.config
        return c.n_heads, c.n_kv_heads, c.n_kv_heads


def linear(x: Array, weight: Array, how: LinearArithmetic) -> Expectation:
    """x[M, K] times weight[N, K]."""
    from llms.verify.reference.arithmetic import products

    rows = np.ascontiguousarray(x)
    dims = {"M": rows.shape[0], "K": rows.shape[1], "N": weight.shape[0]}
    plain = reference_output("gemm", {"a": rows, "b": weight.T}, dims=dims)
    if how.blocked:
        near = products.gemm(_torch(rows), products.quantised_weight(_torch(weight)), how)
    else:
        near = products.gemv(_torch(rows), _torch(weight), how)
    return Expectation(plain, _numpy(near))


def plain_attention(q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    """fp32 attention of the kernel harness; q [H, n, d], k and v [KV, m, d]."""
    (heads, n, d), (kv, m, _) = q.shape, k.shape
    dims = {"lq": n, "lk": m, "head_dim": d, "q_heads": heads, "kv_heads": kv}
    given = {"q": q, "k": k, "v": v}
    return reference_output(
        "flash_attention", given, dims=dims, method="head_first", attrs={"causal": causal}
    )


def split_heads(array: Array, heads: int, truth: Truth) -> Array:
    """[rows, device width] -> [heads, rows, head_dim] of the model."""
    from llms.llama_kernel_builder.device_config import head_columns

    columns = head_columns(truth.config, heads)
    real = np.asarray(array)[:, columns].reshape(array.shape[0], heads, truth.config.head_dim)
    return np.ascontiguousarray(real.transpose(1, 0, 2))


def join_heads(array: Array, truth: Truth) -> Array:
    """[heads, rows, head_dim] -> [rows, query width on the device]."""
    from llms.llama_kernel_builder.device_config import head_columns

    heads, rows, d = array.shape
    out = np.zeros((rows, truth.device.q_dim), dtype=array.dtype)
    out[:, head_columns(truth.config, heads)] = array.transpose(1, 0, 2).reshape(rows, heads * d)
    return out


def _torch(array: Array) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16).copy()).view(torch.bfloat16)


def _numpy(tensor: Any) -> Array:
    import torch

    bits: Array = tensor.contiguous().view(torch.int16).numpy().copy()
    return bits.view(bfloat16)
