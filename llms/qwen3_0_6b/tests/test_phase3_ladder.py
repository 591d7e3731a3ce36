"""Phase 3: the rungs that compare with a reference."""

from llms.verify.suite import test_reference_ladder as test_ladder  # noqa: F401
