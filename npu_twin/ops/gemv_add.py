"""Matrix times vector plus residual by the cascade kernel (Xilinx/mlir-air e972f2942, bf16_cascade)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fixed_order.products import Gemv
from npu_twin.bf16 import F32, NEAREST_EVEN, U16
from npu_twin.datapath._steps import Step, round_into, scratch, sequence, upper
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.listing import Launch
from npu_twin.memory import OperandView
from npu_twin.npu2 import COLUMNS, L2_BYTES, ROWS
from npu_twin.ops._streams import divisors
from npu_twin.ops.gemv import CASCADE_CHUNK, CASCADE_STAGES, cascade_us, check_rows
from npu_twin.opset import Config, Dims, Finding, Findings, LaunchLike, Op, Signature, Values, read, write


def signature(d: Dims, method: str, tile: Mapping[str, int]) -> Signature:
    """Operands: w [M, K], x [K], residual and out [M]."""
    M, K = d["M"], d["K"]
    return {"w": read(M, K), "x": read(K), "residual": read(M), "out": write(M)}


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
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


def check(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one cascade GEMV with residual add."""
    M, K = launch.dims["M"], launch.dims["K"]
    if K % CASCADE_CHUNK:
        yield Finding("V9", f"the cascade is right only for multiples of {CASCADE_CHUNK} along K", {"K": K})
    yield from check_rows(M, launch.tile["tile_m"], launch.tile["m_input"], launch.herd[0])
    stages = launch.attrs.get("n_cascade")
    if stages is not None and stages not in CASCADE_STAGES:
        yield Finding("V10", "the cascade has 2, 3 or 4 stages, one row of cores each", {"n_cascade": stages})


def space(d: Dims, method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    """Tiles that the plain GEMV's L2 rule allows: the cascade's own limit is not published."""
    M, K = d["M"], d["K"]
    for hm in range(COLUMNS, 0, -1):
        for tm in divisors(M // hm, 16, 2) if M % hm == 0 else []:
            if 2 * hm * tm * (K + 1) <= L2_BYTES:
                yield Config("gemv_add", "cascade", d, {"tile_m": tm, "m_input": tm}, (hm, ROWS))


def work(p: Values, launch: LaunchLike, alone: bool) -> float:
    """The product; the residual hides behind the weights."""
    return cascade_us(p, launch.dims["M"], launch.dims["K"], launch, alone)


OP = Op(
    ("M", "K"),
    signature,
    prepare,
    check,
    space,
    work,
    methods=("cascade",),
    rounding=NEAREST_EVEN,
    tile_keys=("tile_m", "m_input"),
    fill="gemv.fill_us",
    whole_array=True,
    one_row=True,
)
