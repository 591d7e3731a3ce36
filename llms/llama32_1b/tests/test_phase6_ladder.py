"""Phase 6: all rungs of the ladder on the production path."""

from llms.verify.suite import test_ladder, test_compiled_lengths  # noqa: F401, I001
