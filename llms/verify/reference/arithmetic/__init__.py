"""A second, independent implementation of the device's arithmetic, for the matched reference.

``description`` says which arithmetic a deployment uses, without torch; ``rounding``, ``products``,
``elementwise`` and ``attention`` compute it, in torch.

Origin of the numerics: kernels and kernel registry of Xilinx/mlir-air e972f2942, the rounding modes from the
public issues and pull requests of Xilinx/mlir-aie. The twin has an implementation of its own; the two share
no code and are held against each other kernel by kernel.
"""

from llms.verify.reference.arithmetic.description import (
    AttentionArithmetic,
    DescribedRunner,
    DescriptionError,
    DeviceArithmetic,
    LinearArithmetic,
    PhaseArithmetic,
)

__all__ = [
    "AttentionArithmetic",
    "DescribedRunner",
    "DescriptionError",
    "DeviceArithmetic",
    "LinearArithmetic",
    "PhaseArithmetic",
]
