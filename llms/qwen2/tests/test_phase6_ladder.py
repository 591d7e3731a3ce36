"""Phase 6: all rungs of the ladder on the production path."""

from llms.verify.suite import test_compiled_lengths, test_ladder  # noqa: F401
