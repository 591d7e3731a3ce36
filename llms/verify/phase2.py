"""Name that folders of earlier scaffolds import; see llms.verify.gates.phase2.gate."""

from llms.verify.gates.phase2.gate import block_gate

__all__ = ["block_gate"]
