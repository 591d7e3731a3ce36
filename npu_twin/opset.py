"""Signatures of the kernels that a program listing can launch: dimensions, methods and operand shapes.

The vocabulary follows the leaf kernels of the public mlir-air LLM examples (Xilinx/mlir-air e972f2942,
``programming_examples``). Shapes here are what the kernel's interface fixes; which tiles the device can
place is the business of ``npu_twin.constraints``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Access = Literal["read", "write"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class OperandSpec:
    """What an operand must be: its shape, data type (``bf16`` or ``f32``) and whether the launch writes
    it.
    """

    shape: Shape
    dtype: str = "bf16"
    access: Access = "read"


Signature = Mapping[str, OperandSpec]


@dataclass(frozen=True)
class OpSpec:
    """One operation: the dimensions it needs, its methods and the operands that follow from them.

    ``methods`` is empty for an operation with one implementation; such a launch may name any method.
    """

    dims: tuple[str, ...]
    methods: tuple[str, ...]
    signature: Callable[[Mapping[str, int], str, Mapping[str, int]], Signature]
    rounding: str = "floor"


def _r(*shape: int, dtype: str = "bf16") -> OperandSpec:
    return OperandSpec(shape, dtype, "read")


def _w(*shape: int, dtype: str = "bf16") -> OperandSpec:
    return OperandSpec(shape, dtype, "write")


def _gemm(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> Signature:
    M, K, N = d["M"], d["K"], d["N"]
    operands = {
        "a": _r(M, K),
        "b": _r(K, N),
        "out": _w(M, N, dtype="f32" if method == "external" else "bf16"),
    }
    if method == "fused-cast":
        operands["scratch"] = _w(M, N, dtype="f32")
    return operands


def _gemv(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> Signature:
    return {"w": _r(d["M"], d["K"]), "x": _r(d["K"]), "out": _w(d["M"])}


def _gemv_add(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> Signature:
    return {"w": _r(d["M"], d["K"]), "x": _r(d["K"]), "residual": _r(d["M"]), "out": _w(d["M"])}


def _norm_gateup_swiglu(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> Signature:
    emb, hidden = d["emb"], d["hidden"]
    return {"packed": _r(2, emb), "w": _r(2 * hidden, emb), "out": _w(hidden)}


def _rms_norm(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> Signature:
    M, N = d["M"], d["N"]
    return {"x": _r(M, N), "w": _r(N), "out": _w(M, N)}


def _layer_norm(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> Signature:
    M, N = d["M"], d["N"]
    return {"x": _r(M, N), "w": _r(N), "b": _r(N), "out": _w(M, N)}


def _rope(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> Signature:
    shape = (d["rows"], d["head_dim"])
    return {"x": _r(*shape), "table": _r(*shape), "out": _w(*shape)}


def _flash_attention(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> Signature:
    lq, lk, hd, qh, kvh = d["lq"], d["lk"], d["head_dim"], d["q_heads"], d["kv_heads"]
    if method == "seq_first":
        kv = _r(lk, kvh * hd)
        return {"q": _r(lq, qh * hd), "k": kv, "v": kv, "out": _w(lq, qh * hd)}
    dv_tile = tile.get("dv_tile", hd)
    chunks, rest = divmod(hd, dv_tile)
    if rest:
        raise ValueError(f"head_dim {hd} is not a multiple of dv_tile {dv_tile}")
    return {
        "q": _r(qh, lq, hd),
        "k": _r(kvh, lk, hd),
        "v": _r(kvh * chunks, lk, dv_tile),
        "out": _w(qh * chunks, lq, dv_tile),
    }


def _eltwise_add(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> Signature:
    return {"a": _r(d["n"]), "b": _r(d["n"]), "out": _w(d["n"])}


def _bias_add(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> Signature:
    rows, n = d["rows"], d["n"]
    return {"x": _r(rows, n), "bias": _r(n), "out": _w(rows, n)}


def _silu_mul(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> Signature:
    return {"gate": _r(d["n"]), "up": _r(d["n"]), "out": _w(d["n"])}


def _gelu(d: Mapping[str, int], method: str, tile: Mapping[str, int]) -> Signature:
    return {"x": _r(d["n"]), "out": _w(d["n"])}


_MATMUL = "nearest_even"

OPS: Mapping[str, OpSpec] = {
    "gemm": OpSpec(("M", "K", "N"), ("drain", "fused-cast", "direct", "external"), _gemm, _MATMUL),
    "gemv": OpSpec(("M", "K"), ("external",), _gemv, _MATMUL),
    "gemv_add": OpSpec(("M", "K"), ("cascade",), _gemv_add, _MATMUL),
    "norm_gateup_swiglu": OpSpec(("emb", "hidden"), ("cascade",), _norm_gateup_swiglu),
    "rms_norm": OpSpec(("M", "N"), ("weighted", "weighted_bf16_sum"), _rms_norm),
    "layer_norm": OpSpec(("M", "N"), ("affine",), _layer_norm),
    "rope": OpSpec(("rows", "head_dim"), ("half_split", "interleaved"), _rope),
    "flash_attention": OpSpec(
        ("lq", "lk", "head_dim", "q_heads", "kv_heads"),
        ("seq_first", "head_first"),
        _flash_attention,
        _MATMUL,
    ),
    "eltwise_add": OpSpec(("n",), (), _eltwise_add),
    "bias_add": OpSpec(("rows", "n"), (), _bias_add),
    "silu_mul": OpSpec(("n",), (), _silu_mul),
    "gelu": OpSpec(("n",), (), _gelu),
}
"""All operations by name."""
