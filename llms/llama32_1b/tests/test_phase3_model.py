"""Phase 3: the whole model with one ELF per kernel: token-set gate, table of layers, baseline times."""

from llms.verify.suite import test_unfused_model  # noqa: F401
