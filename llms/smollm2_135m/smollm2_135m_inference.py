"""Inference of SmolLM2-135M on NPU2: the production functions and the command line.

Run ``python -m llms.smollm2_135m.smollm2_135m_inference --prompt "What is gravity?"``.
"""

from __future__ import annotations

import sys

from llms.llama_kernel_builder.deployment.production import ProductionFunctions
from llms.llama_kernel_builder.llama_loop import KernelSequence

from .smollm2_135m_decode import decode_blocks, decode_layer, lm_head
from .smollm2_135m_prefill import prefill_blocks, prefill_layer

MODEL = "smollm2_135m"
SEQUENCE = KernelSequence(prefill_blocks, prefill_layer, decode_blocks, decode_layer, lm_head)

_functions = ProductionFunctions(lambda: SEQUENCE)
prepare_runtime = _functions.prepare_runtime
run_npu_prefill = _functions.run_npu_prefill
run_npu_decode_step = _functions.run_npu_decode_step

if __name__ == "__main__":
    from llms.llama_kernel_builder.deployment import inference_cli

    sys.exit(inference_cli.run(__package__))
