"""Phase 4: every optimisation of the prefill, measured against the form before it."""

from llms.verify.suite import test_prefill_steps  # noqa: F401
