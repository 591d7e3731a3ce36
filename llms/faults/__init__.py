"""Faults of a deployment's own code: model, loop, host toolkit, tokens, reference, gate and time.

They join the catalogue of :mod:`npu_twin.faults` by the entry point ``model`` of the group ``npu_faults``.
Plants replace functions of the toolkit by :mod:`unittest.mock`, which restores them when a test fails, too.
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
