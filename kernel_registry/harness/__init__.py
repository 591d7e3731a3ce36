"""Inputs, plain references, metrics and tolerances with which a kernel is judged.

The recipe of the kernel registry of Xilinx/mlir-air e972f2942 (``programming_examples``): fixed seeds, a
float32 reference on the bf16 inputs rounded to the output type, an element-wise gate without exceptions.
Nothing here knows the twin or the device; a reference computes what a kernel must compute, in plain numpy.
"""

from kernel_registry.harness.inputs import make_inputs
from kernel_registry.harness.metrics import Metrics, Offenders, compare, offenders
from kernel_registry.harness.references import reference_output
from kernel_registry.harness.tolerances import Tolerance, tolerance

__all__ = [
    "Metrics",
    "Offenders",
    "Tolerance",
    "compare",
    "make_inputs",
    "offenders",
    "reference_output",
    "tolerance",
]
