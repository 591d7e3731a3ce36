"""Name that folders of earlier scaffolds import; see llms.verify.gates.phase6.performance."""

from llms.verify.gates.phase6.performance import breakdown, decode_one, first_token, set_up

__all__ = ["breakdown", "decode_one", "first_token", "set_up"]
