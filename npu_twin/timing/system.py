"""Time outside a program: buffer transfers, host operations, dispatch, context switch, wake-up."""

from __future__ import annotations

from npu_twin.opset import Values
from npu_twin.timing.parameters import current

_HOST_FIXED_US = 5.0
"""Entering a small array operation of the interpreter."""


def sync_us(nbytes: int, to_device: bool) -> float:
    """Return the time in microseconds to move `nbytes` between the host and device copies of a buffer."""
    p = current()
    rate = p["host.write_gbps"] if to_device else p["host.read_gbps"]
    return p["host.sync_us"] + nbytes / rate * 1e-3


def work_us(p: Values, nbytes: int, flops: int) -> float:
    """Return the time in microseconds of a host operation at the general rates of parameters `p`."""
    return _HOST_FIXED_US + nbytes / p["host.copy_gbps"] * 1e-3 + flops / p["host.flops_per_us"]


def host_op_us(name: str, nbytes: int = 0, flops: int = 0) -> float:
    """Return the time in microseconds of a host operation.

    Args:
        name: operation; those that the published profiles time (tokenize, embed_lookup, kv_cache_extract,
            final_rms_norm, decode_attention_cpu) use their figures, others the general rates.
        nbytes: bytes read and written.
        flops: arithmetic operations.
    """
    p = current()
    if name == "tokenize":
        return p["host.tokenize_us"]
    if name == "embed_lookup":
        return _HOST_FIXED_US + nbytes / p["host.embed_gbps"] * 1e-3
    if name == "kv_cache_extract":
        return _HOST_FIXED_US + nbytes / p["host.kv_extract_gbps"] * 1e-3
    if name == "final_rms_norm":
        return p["host.norm_us"]
    if name == "decode_attention_cpu":
        # the published figure is that of a short context; a longer one is bound by reading the cache
        return max(
            p["host.attention_us"], nbytes / p["host.copy_gbps"] * 1e-3 + flops / p["host.flops_per_us"]
        )
    return work_us(p, nbytes, flops)


def dispatch_us() -> float:
    """Return the host time in microseconds between the start of a run and its first work on the device."""
    return current()["host.dispatch_us"]


def context_switch_us() -> float:
    """Return the time in microseconds to change between two hardware contexts of one process."""
    return current()["program.context_switch_us"]


def wake_us(idle_s: float) -> float:
    """Return what the first run after `idle_s` seconds without work pays for the device to wake up, in us."""
    p = current()
    return p["power.wake_us"] if idle_s > p["power.idle_limit_s"] else 0.0
