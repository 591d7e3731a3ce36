"""Modelled time of the NPU2: launches, whole programs, buffer transfers and host work.

Everything here is a prediction in microseconds of device time, computed from the listing alone: no value is
computed and no weight is needed. The functions are plain Python and cheap enough for the decode loop.
"""

from npu_twin.timing.launch import launch_us
from npu_twin.timing.program import RunTiming, run_us
from npu_twin.timing.system import (
    context_switch_us,
    dispatch_us,
    host_op_us,
    sync_us,
    wake_us,
)

__all__ = [
    "RunTiming",
    "context_switch_us",
    "dispatch_us",
    "host_op_us",
    "launch_us",
    "run_us",
    "sync_us",
    "wake_us",
]
