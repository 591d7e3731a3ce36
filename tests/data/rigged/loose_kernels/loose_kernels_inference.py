"""Production functions, as they should be."""

from llms.llama_kernel_builder.deployment.production import ProductionFunctions
from llms.qwen2.qwen2_inference import SEQUENCE

MODEL = "loose_kernels"

_functions = ProductionFunctions(lambda: SEQUENCE)
prepare_runtime = _functions.prepare_runtime
run_npu_prefill = _functions.run_npu_prefill
run_npu_decode_step = _functions.run_npu_decode_step

__all__ = ["MODEL", "SEQUENCE", "prepare_runtime", "run_npu_decode_step", "run_npu_prefill"]
