"""The gates, one home per phase: `llms.verify.gates.phase<N>.gate`.

The functions of phase 6 are reachable here, too, as test files of earlier scaffolds call them.
"""

from llms.verify.gates.phase6.gate import diagnosis_problems, layer_diagnosis, topk_gate

__all__ = ["diagnosis_problems", "layer_diagnosis", "topk_gate"]
