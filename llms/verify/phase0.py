"""Name that folders of earlier scaffolds import; see llms.verify.gates.phase0.gate."""

from llms.verify.gates.phase0.gate import CHECKS, run

__all__ = ["CHECKS", "run"]
