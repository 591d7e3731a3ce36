"""Element-wise kernels: add, bias add, rotary embedding, SiLU-and-Mul and GELU.

They run on cores without a matrix product, so their results round in the reset mode (toward minus infinity)
unless the launch says otherwise. Sums and products are f32 with one rounding each
(Xilinx/mlir-air e972f2942: eltwise_add, rope_halfsplit, silu_and_mul, gelu).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from npu_twin.bf16 import F32, U16
from npu_twin.datapath._steps import Step, round_into, row_blocks, scratch, sequence, upper
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.tables import gelu_table, silu_table
from npu_twin.listing import Launch
from npu_twin.memory import OperandView


def prepare_eltwise_add(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[n] = a[n] + b[n]."""
    a, b, out = (operands[name].u16 for name in ("a", "b", "out"))
    rounding = choice.rounding_of(launch.rounding)
    return sequence([_add_block(a[part], b[part], out[part], rounding) for part in row_blocks(a.size, 1)])


def _add_block(a: U16, b: U16, out: U16, rounding: str) -> Step:
    wide_a, wide_b, total = (scratch(n, a.shape) for n in ("wide.0", "wide.1", "sum"))
    top_a, top_b = upper(wide_a), upper(wide_b)
    store = round_into(total, out, rounding)
    copyto, add = np.copyto, np.add

    def run() -> None:
        copyto(top_a, a)
        copyto(top_b, b)
        add(wide_a, wide_b, out=total)
        store()

    return run


def prepare_bias_add(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[rows, n] = x[rows, n] + bias[n]."""
    x, bias, out = (operands[name].u16 for name in ("x", "bias", "out"))
    rounding = choice.rounding_of(launch.rounding)
    return sequence([_add_block_row(x[part], bias, out[part], rounding) for part in row_blocks(*x.shape)])


def _add_block_row(x: U16, bias: U16, out: U16, rounding: str) -> Step:
    wide_x, total = scratch("wide.0", x.shape), scratch("sum", x.shape)
    wide_b = scratch("wide.1", bias.shape)
    top_x, top_b = upper(wide_x), upper(wide_b)
    store = round_into(total, out, rounding)

    def run() -> None:
        np.copyto(top_x, x)
        np.copyto(top_b, bias)
        np.add(wide_x, wide_b, out=total)
        store()

    return run


def prepare_rope(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """Rotate the pairs of each row by the angles of its table row [cos half | sin half].

    Pairs are (i, i + half) in method ``half_split`` and (2i, 2i + 1) in method ``interleaved``. Raises
    ValueError for an odd head dimension.
    """
    x, table, out = (operands[name].u16 for name in ("x", "table", "out"))
    rounding = choice.rounding_of(launch.rounding)
    width = x.shape[1]
    if width % 2:
        raise ValueError(f"launch {launch.name}: head_dim={width} is odd, rotary embedding turns pairs")
    split = launch.method == "half_split"
    return sequence(
        [
            _rope_block(x[part], table[part], out[part], split, rounding)
            for part in row_blocks(x.shape[0], width)
        ]
    )


def _rope_block(x: U16, table: U16, out: U16, split: bool, rounding: str) -> Step:
    rows, half = x.shape[0], x.shape[1] // 2
    planes = (2, rows, half)

    def pairs(bits: U16) -> U16:
        """The first and the second elements of all pairs as two planes [rows, half]."""
        if split:
            return bits.reshape(rows, 2, half).transpose(1, 0, 2)
        return bits.reshape(rows, half, 2).transpose(2, 0, 1)

    wide_x, wide_t, by_cos, by_sin = (scratch(n, planes) for n in ("wide.0", "wide.1", "sum", "product"))
    top_x, top_t, x_pairs, angles = upper(wide_x), upper(wide_t), pairs(x), table.reshape(rows, 2, half)
    angles = angles.transpose(1, 0, 2)
    flat_x, cos, sin = wide_x.reshape(2, -1), wide_t[0].reshape(-1), wide_t[1].reshape(-1)
    flat_cos, flat_sin = by_cos.reshape(2, -1), by_sin.reshape(2, -1)
    first, second = flat_cos
    first_sin, second_sin = flat_sin
    store = round_into(by_cos, pairs(out), rounding)
    copyto, multiply, add, subtract = np.copyto, np.multiply, np.add, np.subtract

    def run() -> None:
        copyto(top_x, x_pairs)
        copyto(top_t, angles)
        multiply(flat_x, cos, out=flat_cos)
        multiply(flat_x, sin, out=flat_sin)
        subtract(first, second_sin, out=first)
        add(second, first_sin, out=second)
        store()

    return run


def prepare_silu_mul(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[n] = silu(gate[n]) * up[n]; silu is a function of one bf16 value and read from its table."""
    gate, up, out = (operands[name].u16 for name in ("gate", "up", "out"))
    rounding = choice.rounding_of(launch.rounding)
    table = silu_table(rounding, choice.tanh)
    return sequence(
        [_silu_block(table, gate[part], up[part], out[part], rounding) for part in row_blocks(gate.size, 1)]
    )


def _silu_block(table: F32, gate: U16, up: U16, out: U16, rounding: str) -> Step:
    wide, product = scratch("wide.0", gate.shape), scratch("sum", gate.shape)
    top = upper(wide)
    store = round_into(product, out, rounding)
    copyto, multiply, take = np.copyto, np.multiply, np.take

    def run() -> None:
        copyto(top, up)
        take(table, gate, out=product, mode="clip")
        multiply(product, wide, out=product)
        store()

    return run


def prepare_gelu(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[n] = gelu(x[n]) in the tanh form, read from its table."""
    x, out = operands["x"].u16, operands["out"].u16
    table = gelu_table(choice.rounding_of(launch.rounding), choice.tanh)
    take = np.take

    def run() -> None:
        take(table, x, out=out, mode="clip")

    return run
