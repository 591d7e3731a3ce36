"""Matrix multiplication in block floating point, with the output casts of the four published methods.

Measured on the kernel registry of Xilinx/mlir-air e972f2942: ``external`` leaves f32; ``drain`` casts once on
the core that multiplied (nearest even); ``fused-cast`` leaves f32 in DDR and casts in a second launch, whose
cores hold no product and round toward minus infinity; ``direct`` keeps its running sum in bf16 and rounds it
after every ``tile_k_l1`` step along K, which is why its error grows with the square root of K.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from npu_twin.bf16 import FLOOR, NEAREST_EVEN, U16
from npu_twin.datapath._steps import Step, as_bf16, round_into, row_blocks, scratch, sequence, upper
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.blockfloat import check_blocked, quantise_, quantised_rows, weight_key
from npu_twin.listing import Launch
from npu_twin.memory import OperandView


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[M, N] = a[M, K] @ b[K, N]; ``b`` is quantised once per content of its device memory."""
    M, K, N = launch.dims["M"], launch.dims["K"], launch.dims["N"]
    check_blocked(K, f"launch {launch.name}: K")
    a, b, out = operands["a"], operands["b"], operands["out"]
    rounding = choice.rounding_of(launch.rounding)
    load = _loader(a.u16, b, choice)

    if launch.method == "external":
        return _multiply(load, _tensor(out), None)
    if launch.method == "fused-cast":
        cast_rounding = choice.cast_rounding or choice.rounding or launch.attrs.get("cast_rounding", FLOOR)
        product = operands["scratch"]
        return _multiply(load, _tensor(product), caster(product.f32, out.u16, str(cast_rounding)))
    if launch.method == "direct" and choice.direct_cast != "once":
        step = int(launch.tile.get("tile_k_l1" if choice.direct_cast == "per_l1" else "tile_k_l2", 32))
        return _multiply_rounding(load, (M, N), out, step, rounding)

    def run() -> None:
        acc = scratch("gemm.acc", (M, N))
        left, right = load()
        _mm(left, right, out=_from(acc))
        caster(acc, out.u16, rounding)()

    return run


def _from(array: Any) -> Any:
    return torch.from_numpy(array)


def _tensor(view: OperandView) -> Any:
    return _from(view.f32)


def _mm(left: Any, right: Any, out: Any) -> None:
    torch.mm(left, right, out=out)


def _multiply(load: Any, out: Any, cast: Step | None) -> Step:
    def run() -> None:
        left, right = load()
        _mm(left, right, out=out)
        if cast is not None:
            cast()

    return run


def _loader(a: U16, b: OperandView, choice: Arithmetic) -> Any:
    """Closure giving both operands as f32 tensors [M, K] and [K, N] with quantised content."""
    M, K = a.shape
    N = b.shape[1]
    key = weight_key(choice)
    transposed = a.T

    def make() -> Any:
        return quantised_rows(b.u16, choice)

    def load() -> tuple[Any, Any]:
        weight = b.derived(key, make)
        left = scratch("wide.gemm.a", (K, M))
        np.copyto(upper(left), transposed)
        columns = _from(left)
        quantise_(columns, choice)
        right = _from(scratch("wide.gemm.b", (K, N)))
        right.copy_(weight)
        return columns.t(), right

    return load


def _multiply_rounding(load: Any, shape: tuple[int, int], out: OperandView, step: int, rounding: str) -> Step:
    """Running sum held in bf16: add the f32 product of ``step`` along K, round, repeat."""
    target = as_bf16(out.u16)

    def run() -> None:
        left, right = load()
        acc = scratch("gemm.acc", shape)
        total = _from(acc)
        total.zero_()
        for k in range(0, left.shape[1], step):
            total.addmm_(left[:, k : k + step], right[k : k + step])
            if rounding == NEAREST_EVEN:
                target.copy_(total)
            else:
                caster(acc, out.u16, rounding)()
            total.copy_(target)

    return run


def caster(source: Any, target: U16, rounding: str) -> Step:
    """Closure that rounds f32[M, N] to bf16 bits. ``source`` survives."""
    if rounding == NEAREST_EVEN:
        from_, to = _from(source), as_bf16(target)

        def cast() -> None:
            to.copy_(from_)

        return cast
    flat, bits = source.reshape(-1), target.reshape(-1)
    return sequence(
        [
            round_into(flat[part], bits[part], rounding, "gemm.cast", keep=True)
            for part in row_blocks(flat.size, 1)
        ]
    )
