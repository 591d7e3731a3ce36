"""Faults of a deployment's own code: model, loop, host toolkit, tokens, reference, gate and time.

They are part of the catalogue of :mod:`npu_twin.faults`.
"""

from llms.faults import host, loop, model, narrow, slow, steps, verdict

FAULTS = (
    *model.FAULTS,
    *narrow.FAULTS,
    *loop.FAULTS,
    *steps.FAULTS,
    *host.FAULTS,
    *slow.FAULTS,
    *verdict.FAULTS,
)
