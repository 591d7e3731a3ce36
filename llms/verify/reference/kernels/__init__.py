"""Inputs, plain references, metrics and tolerances with which a kernel is judged.

The recipe of the kernel registry of Xilinx/mlir-air e972f2942 (``programming_examples``): fixed seeds, a
float32 reference on the bf16 inputs rounded to the output type, an element-wise gate without exceptions.
Nothing here knows the twin or the device; a reference computes what a kernel must compute, in plain numpy.
"""

from llms.verify.reference.kernels.inputs import make_inputs
from llms.verify.reference.kernels.metrics import Metrics, Offenders, compare, offenders
from llms.verify.reference.kernels.published import PUBLISHED_SOURCE, Published, published
from llms.verify.reference.kernels.references import reference_output
from llms.verify.reference.kernels.tolerances import Tolerance, tolerance

__all__ = [
    "PUBLISHED_SOURCE",
    "Metrics",
    "Offenders",
    "Published",
    "Tolerance",
    "compare",
    "make_inputs",
    "offenders",
    "published",
    "reference_output",
    "tolerance",
]
