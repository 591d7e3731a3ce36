"""Phase 6: the token-set gate on the production path."""

from llms.verify.suite import test_topk_gate  # noqa: F401
