"""Device time of one launch: bytes over bandwidth against operations over rate, plus a fixed part."""

from __future__ import annotations

from npu_twin.timing.types import LaunchLike

_BYTES_BF16 = 2


def launch_us(launch: LaunchLike) -> float:
    """Return the modelled device time in microseconds of one launch inside a program.

    Raises:
        ValueError: for an operation the model does not know.
    """
    d = launch.dims
    op = launch.op
    start = 8.0
    if op == "gemm":
        flops = 2.0 * d["M"] * d["K"] * d["N"]
        return start + flops / 7.0e6
    if op in ("gemv", "gemv_add"):
        return start + _BYTES_BF16 * d["M"] * d["K"] / 33.0e3
    if op == "norm_gateup_swiglu":
        return start + _BYTES_BF16 * 2 * d["hidden"] * d["emb"] / 33.0e3
    if op in ("rms_norm", "layer_norm"):
        return start + 2 * _BYTES_BF16 * d["M"] * d["N"] / 25.0e3
    if op == "rope":
        return start + 3 * _BYTES_BF16 * d["rows"] * d["head_dim"] / 60.0e3
    if op == "flash_attention":
        return start + 4.0 * d["lq"] * d["lk"] * d["head_dim"] * d["q_heads"] / 2.0e6
    if op == "eltwise_add":
        return start + 3 * _BYTES_BF16 * d["n"] / 68.0e3
    if op == "bias_add":
        return start + 2 * _BYTES_BF16 * d["rows"] * d["n"] / 45.0e3
    if op == "silu_mul":
        return start + 3 * _BYTES_BF16 * d["n"] / 24.5e3
    if op == "gelu":
        return start + 2 * _BYTES_BF16 * d["n"] / 28.0e3
    raise ValueError(f"timing: no model for operation {op!r}")
