"""Name that folders of earlier scaffolds import; see llms.verify.gates.phase1.gate."""

from llms.verify.gates.phase1.gate import check, generate_tests, kernels

__all__ = ["check", "generate_tests", "kernels"]
