"""Name that folders of earlier scaffolds import; see llms.verify.gates.optimisation."""

from llms.verify.gates.optimisation import baseline_gate, decode_gate, prefill_gate

__all__ = ["baseline_gate", "decode_gate", "prefill_gate"]
