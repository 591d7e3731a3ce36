"""Phase 7: the independent audit, in a process of its own and without caches."""

from llms.verify.suite import test_independent_audit  # noqa: F401
