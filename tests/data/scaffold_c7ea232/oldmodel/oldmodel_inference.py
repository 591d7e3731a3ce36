"""Inference of tiny on NPU2: the production functions and the command line.

In the folder above this one, run
``python -m oldmodel.oldmodel_inference --prompt "What is gravity?"``.
"""

from __future__ import annotations

import sys

from llms.llama_kernel_builder.llama_loop import KernelSequence
from llms.production import ProductionFunctions

from .oldmodel_decode import decode_blocks, decode_layer, lm_head
from .oldmodel_prefill import prefill_blocks, prefill_layer

MODEL = "oldmodel"
SEQUENCE = KernelSequence(prefill_blocks, prefill_layer, decode_blocks, decode_layer, lm_head)

_functions = ProductionFunctions(lambda: SEQUENCE)
prepare_runtime = _functions.prepare_runtime
run_npu_prefill = _functions.run_npu_prefill
run_npu_decode_step = _functions.run_npu_decode_step

if __name__ == "__main__":
    from llms import inference_cli
    from oldmodel import verify_adapter

    sys.exit(inference_cli.main(verify_adapter))
