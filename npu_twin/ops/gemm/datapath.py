"""Matrix multiplication in block floating point, with the output casts of the four published methods.

Measured on the kernel registry of Xilinx/mlir-air e972f2942: ``external`` leaves f32; ``drain`` casts once on
the core that multiplied (nearest even); ``fused-cast`` leaves f32 in DDR and casts in a second launch, whose
cores hold no product and round toward minus infinity; ``direct`` keeps its running sum in bf16 and rounds it
after every ``tile_k_l1`` step along K, which is why its error grows with the square root of K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fixed_order.products import GROUP, PackedProduct, groups, pack_columns
from npu_twin.bf16 import F32, FLOOR, NEAREST_EVEN, U16
from npu_twin.datapath._steps import Step, as_bf16, round_into, row_blocks, scratch, sequence
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.blockfloat import check_blocked, quantised_columns, quantised_rows, weight_key
from npu_twin.listing import Launch
from npu_twin.memory import OperandView

_Load = Callable[[], tuple[F32, U16]]


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[M, N] = a[M, K] @ b[K, N]; ``b`` is quantised once per content of its device memory."""
    M, K, N = launch.dims["M"], launch.dims["K"], launch.dims["N"]
    check_blocked(K, f"launch {launch.name}: K")
    a, b, out = operands["a"], operands["b"], operands["out"]
    rounding = choice.rounding_of(launch.rounding)
    load = _loader(a.u16, b, choice)

    if launch.method == "external":
        return _multiply(load, out.f32, None)
    if launch.method == "fused-cast":
        cast_rounding = choice.cast_rounding or choice.rounding or launch.attrs.get("cast_rounding", FLOOR)
        product = operands["scratch"]
        return _multiply(load, product.f32, caster(product.f32, out.u16, str(cast_rounding)))
    if launch.method == "direct" and choice.direct_cast != "once":
        step = int(launch.tile.get("tile_k_l1" if choice.direct_cast == "per_l1" else "tile_k_l2", 32))
        return _multiply_rounding(load, (M, N, K), out, step, rounding)

    def run() -> None:
        acc = scratch("gemm.acc", (M, N))
        PackedProduct(*load(), acc)()
        caster(acc, out.u16, rounding)()

    return run


def _multiply(load: _Load, out: F32, cast: Step | None) -> Step:
    def run() -> None:
        PackedProduct(*load(), out)()
        if cast is not None:
            cast()

    return run


def _loader(a: U16, b: OperandView, choice: Arithmetic) -> _Load:
    """Closure giving both operands with quantised content, packed for the product."""
    M, K = a.shape
    key = weight_key(choice)

    def make() -> U16:
        return pack_columns(quantised_columns(b.u16, choice))

    def load() -> tuple[F32, U16]:
        weight = b.derived(key, make)
        left = scratch("gemm.left", (groups(M), K, GROUP))
        quantised_rows(a, choice, left)
        return left, weight

    return load


def _multiply_rounding(
    load: _Load, shape: tuple[int, int, int], out: OperandView, step: int, rounding: str
) -> Step:
    """Running sum held in bf16: go on summing over ``step`` along K in f32, round, repeat."""
    M, N, K = shape
    target = as_bf16(out.u16)

    def run() -> None:
        left, right = load()
        acc = scratch("gemm.acc", (M, N))
        total = torch.from_numpy(acc)
        for k in range(0, K, step):
            PackedProduct(left, right, acc, low=k, high=min(k + step, K), add=k > 0)()
            if rounding == NEAREST_EVEN:
                target.copy_(total)
            else:
                caster(acc, out.u16, rounding)()
            total.copy_(target)

    return run


def caster(source: Any, target: U16, rounding: str) -> Step:
    """Closure that rounds f32[M, N] to bf16 bits. ``source`` survives."""
    if rounding == NEAREST_EVEN:
        from_, to = torch.from_numpy(source), as_bf16(target)

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
