"""Element-wise tolerances per kernel, each with its public source.

All sources are paths below ``programming_examples`` of Xilinx/mlir-air e972f2942. Where no published harness
exists (bias add and the cascade kernels of decode), the reason for the value is given instead.
"""

from __future__ import annotations

from dataclasses import dataclass

RTOL = 1.6e-2
"""Relative tolerance of every published kernel harness."""


@dataclass(frozen=True)
class Tolerance:
    """Gate |out - ref| <= atol + rtol * |ref|, with where the numbers come from."""

    rtol: float
    atol: float
    source: str


_TOLERANCES = {
    "gemm": Tolerance(RTOL, 1.5e-3, "matrix_multiplication/bf16_in_*_out/run.py, high precision"),
    "gemm:low": Tolerance(RTOL, 4e-3, "matrix_multiplication/bf16_in_*_out/run.py, low precision"),
    "gemv": Tolerance(RTOL, 1e-3, "matrix_vector_multiplication/bf16/matvec.py"),
    "gemv_add": Tolerance(
        RTOL,
        4e-2,
        "no published harness: K/512 + 1 roundings of a running sum of order one, each half a bf16 step",
    ),
    "norm_gateup_swiglu": Tolerance(
        RTOL, 8e-2, "no published harness: RMSNorm (5e-2) feeding SiLU-and-Mul (8e-2), the larger of the two"
    ),
    "rms_norm": Tolerance(RTOL, 5e-2, "weighted_rms_norm"),
    "layer_norm": Tolerance(RTOL, 6e-2, "layer_norm"),
    "rope": Tolerance(RTOL, 5e-2, "rope_halfsplit"),
    "eltwise_add": Tolerance(RTOL, 5e-2, "eltwise_add"),
    "bias_add": Tolerance(RTOL, 5e-2, "no published harness: the same arithmetic as eltwise_add"),
    "silu_mul": Tolerance(RTOL, 8e-2, "silu_and_mul"),
    "gelu": Tolerance(RTOL, 5e-2, "gelu"),
    "flash_attention": Tolerance(RTOL, 1e-1, "flash_attention/kernel_fusion_based"),
}


def tolerance(op: str, method: str = "") -> Tolerance:
    """Tolerance of an operation; GEMM method ``direct`` with bf16 output is the low-precision tier.

    Raises ValueError for an unknown operation.
    """
    key = "gemm:low" if (op, method) == ("gemm", "direct") else op
    if key not in _TOLERANCES:
        raise ValueError(f"no tolerance for operation {op!r}; known: {', '.join(_TOLERANCES)}")
    return _TOLERANCES[key]
