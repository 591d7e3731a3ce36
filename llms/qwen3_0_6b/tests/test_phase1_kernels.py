"""Phase 1: every kernel at every shape the model needs, alone on the device."""

from llms.verify.suite import pytest_generate_tests, test_kernel  # noqa: F401
