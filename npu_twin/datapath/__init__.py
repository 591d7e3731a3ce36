"""What the kernels of a program compute, in the arithmetic of the silicon.

:func:`prepare` binds one launch of a listing to device memory and returns a closure that computes it.
:func:`run_launch` runs a launch, for instance a :func:`standalone_launch`, on host arrays.
Single approximations are switched with :func:`arithmetic`.
"""

from npu_twin.datapath.arithmetic import SILICON, Arithmetic, arithmetic, current_arithmetic
from npu_twin.datapath.dispatch import prepare, run_launch, standalone_launch

__all__ = [
    "SILICON",
    "Arithmetic",
    "arithmetic",
    "current_arithmetic",
    "prepare",
    "run_launch",
    "standalone_launch",
]
