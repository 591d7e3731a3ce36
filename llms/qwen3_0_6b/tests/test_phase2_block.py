"""Phase 2: one assembled layer against layer 0 of the reference."""

from llms.verify.suite import test_block  # noqa: F401
