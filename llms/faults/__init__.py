"""Faults of a deployment's own code: weights, positions, KV cache, host toolkit, tokens, reference, gate.

They are part of the catalogue of :mod:`npu_twin.faults`.
"""

from llms.faults import host, loop, model, verdict

FAULTS = (*model.FAULTS, *loop.FAULTS, *host.FAULTS, *verdict.FAULTS)
