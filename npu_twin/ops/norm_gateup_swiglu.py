"""Norm of one row, gate and up products, SwiGLU in one launch (Xilinx/mlir-air e972f2942, bf16_cascade)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fixed_order.products import Gemv
from npu_twin.datapath._steps import Step, round_into, scratch, sequence, upper
from npu_twin.datapath.arithmetic import Arithmetic
from npu_twin.datapath.passes import rms_normed
from npu_twin.datapath.tables import silu_table
from npu_twin.listing import Launch
from npu_twin.memory import OperandView
from npu_twin.npu2 import COLUMNS, ROWS
from npu_twin.ops.gemv import CASCADE_CHUNK, CASCADE_STAGES, cascade_us
from npu_twin.opset import Config, Dims, Finding, Findings, LaunchLike, Op, Signature, Values, read, write

DESCRIPTOR_WORDS = 1024
"""Largest descriptor dimension in 4-byte words: the size field counts from zero up to 1023."""


def signature(d: Dims, method: str, tile: Mapping[str, int]) -> Signature:
    """Operands: packed [2, emb] (row, norm weight), w [2*hidden, emb] (gate and up in turn), out [hidden]."""
    emb, hidden = d["emb"], d["hidden"]
    return {"packed": read(2, emb), "w": read(2 * hidden, emb), "out": write(hidden)}


def prepare(launch: Launch, operands: Mapping[str, OperandView], choice: Arithmetic) -> Step:
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
            rms_normed(packed[:1], packed[1], normed, eps, rounding),
            Gemv(w, normed[0], both),
            round_into(both, rounded, rounding),
            swiglu,
            round_into(product, out, rounding),
        ]
    )


def check(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of the fused decode stage."""
    emb = launch.dims["emb"]
    stages = emb // CASCADE_CHUNK if emb % CASCADE_CHUNK == 0 else None
    if stages not in CASCADE_STAGES:
        yield Finding(
            "V10",
            f"the row must be 2, 3 or 4 chunks of {CASCADE_CHUNK}: one row of cores each",
            {"emb": emb, "emb/512": emb / CASCADE_CHUNK},
        )
    if emb // 2 > DESCRIPTOR_WORDS:
        yield Finding(
            "B6",
            f"the row has {emb // 2} words, one descriptor dimension holds {DESCRIPTOR_WORDS}",
            {"emb": emb},
        )


def space(d: Dims, method: str, attrs: Mapping[str, Any]) -> Iterator[Config]:
    """The one form there is: all columns, a row of cores for each chunk of the row."""
    stages = min(ROWS, max(1, d["emb"] // CASCADE_CHUNK))
    yield Config("norm_gateup_swiglu", "cascade", d, {}, (COLUMNS, stages))


def work(p: Values, launch: LaunchLike, alone: bool) -> float:
    """The products, and the norm of one row before them; SwiGLU hides behind the weights."""
    emb, hidden = launch.dims["emb"], launch.dims["hidden"]
    return cascade_us(p, 2 * hidden, emb, launch, alone) + emb * p["norm.rms_ns"] * 1e-3


OP = Op(
    ("emb", "hidden"),
    signature,
    prepare,
    check,
    space,
    work,
    methods=("cascade",),
    fill="gemv.fill_us",
    whole_array=True,
    one_row=True,
)
