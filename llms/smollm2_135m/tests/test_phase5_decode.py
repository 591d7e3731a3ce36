"""Phase 5: every optimisation of a decode step, measured against the form before it."""

from llms.verify.suite import test_decode_steps  # noqa: F401
