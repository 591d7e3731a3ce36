"""Modelled time of one launch, with the fitted parameters."""

from __future__ import annotations

from npu_twin.timing import kernels
from npu_twin.timing.parameters import current
from npu_twin.timing.types import LaunchLike


def launch_us(launch: LaunchLike) -> float:
    """Return the device time in microseconds of one launch inside a program: loading, first data, work.

    Raises:
        ValueError: for an operation the model does not know.
        KeyError: for a size or tile value that the operation needs and the launch does not name.
    """
    return kernels.loaded_us(current(), launch)


def standalone_us(launch: LaunchLike) -> float:
    """Return the run time in microseconds of a kernel on its own, as the kernel registry measures it.

    Raises as `launch_us` does.
    """
    return kernels.alone_us(current(), launch)
