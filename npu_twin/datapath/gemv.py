"""Matrix-vector products of the decode path: plain, cascade with residual, and norm + gate/up + SwiGLU.

All sum in f32 without a block format (Xilinx/mlir-air e972f2942: mv.cc and the bf16_cascade example), in
running sums as a vector unit has them (:class:`fixed_order.products.Gemv`), and round once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fixed_order.products import Gemv
from npu_twin.bf16 import F32, NEAREST_EVEN, U16
from npu_twin.datapath._steps import Step, round_into, scratch, sequence, upper
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.norms import rms_norm_steps
from npu_twin.datapath.tables import silu_table
from npu_twin.listing import Launch
from npu_twin.memory import OperandView

CASCADE_CHUNK = 512
"""Length along K that one pass of the cascade kernel covers before its bf16 output is updated."""


def prepare_gemv(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[M] = w[M, K] @ x[K], one rounding."""
    w, x, out = (operands[name].u16 for name in ("w", "x", "out"))
    rounding = choice.rounding_of(launch.rounding)
    if rounding == NEAREST_EVEN:
        return Gemv(w, x, out)
    total = scratch("gemv.total", (w.shape[0],))
    return sequence([Gemv(w, x, total), round_into(total, out, rounding)])


def prepare_gemv_add(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
    """out[M] = residual[M] + w[M, K] @ x[K] by the cascade kernel.

    Each chunk of 512 along K is summed in f32, added to the bf16 running output and rounded; the residual
    comes last with one more rounding. Elements past the last whole chunk are never read, as on the device:
    lengths that are no multiple of 512 give wrong numbers, which the compiler's rules keep away.
    """
    w, x, residual, out = (operands[name].u16 for name in ("w", "x", "residual", "out"))
    rounding = choice.rounding_of(launch.rounding)
    M, K = w.shape
    whole = K // CASCADE_CHUNK * CASCADE_CHUNK
    running = scratch("wide.cascade", (M,))
    total = scratch("gemv.total", (M,))
    step = CASCADE_CHUNK if choice.cascade_cast == "per_512" else max(whole, 1)
    steps: list[Step] = [_fill(running)]
    for k in range(0, whole, step):
        part = slice(k, k + step)
        steps.append(Gemv(w[:, part], x[part], total))
        steps.append(_accumulate(running, total))
        steps.append(round_into(total, upper(running), rounding))
    added = scratch("wide.residual", (M,))
    steps += [_load(residual, added), _sum(running, added, total), round_into(total, out, rounding)]
    return sequence(steps)


def prepare_norm_gateup_swiglu(
    launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic
) -> Step:
    """out[hidden] = silu(gate) * up of the weighted RMS norm of one row.

    packed[0] is the row and packed[1] the norm weight; rows 2i and 2i+1 of w[2*hidden, emb] are gate and up
    row i. Gate and up round to bf16 once each; attribute ``eps`` defaults to 1e-5.
    """
    packed, w, out = (operands[name].u16 for name in ("packed", "w", "out"))
    rounding = choice.rounding_of(launch.rounding)
    emb, hidden = launch.dims["emb"], launch.dims["hidden"]
    eps = float(launch.attrs.get("eps", 1e-5))
    normed = np.zeros((1, emb), np.uint16)
    both = scratch("gemv.total", (2 * hidden,))
    rounded = np.zeros(2 * hidden, np.uint16)
    up, product = scratch("wide.up", (hidden,)), scratch("gemv.swiglu", (hidden,))
    gate = rounded[0::2].copy()
    table = silu_table(rounding, choice.tanh)

    def swiglu() -> None:
        np.copyto(gate, rounded[0::2])
        np.copyto(upper(up), rounded[1::2])
        np.take(table, gate, out=product, mode="clip")
        np.multiply(product, up, out=product)

    return sequence(
        [
            *rms_norm_steps(packed[:1], packed[1], normed, eps, rounding),
            Gemv(w, normed[0], both),
            round_into(both, rounded, rounding),
            swiglu,
            round_into(product, out, rounding),
        ]
    )


def _fill(array: F32) -> Step:
    def run() -> None:
        array.fill(0.0)

    return run


def _load(bits: U16, wide: F32) -> Step:
    top = upper(wide)

    def run() -> None:
        np.copyto(top, bits)

    return run


def _accumulate(running: F32, total: F32) -> Step:
    def run() -> None:
        np.add(running, total, out=total)

    return run


def _sum(a: F32, b: F32, out: F32) -> Step:
    def run() -> None:
        np.add(a, b, out=out)

    return run
