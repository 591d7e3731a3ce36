"""Phase 0: weights, configuration, rotary angles, tokens and the reference run."""

from llms.verify.suite import test_reference  # noqa: F401
