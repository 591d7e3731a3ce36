"""Phase 1: every kernel at every shape the model needs, alone on the device."""

import pytest

from llms import phase1

pytestmark = pytest.mark.phase1
pytest_generate_tests = phase1.generate_tests


def test_kernel(kernel, npu_device, npu_lock, npu_record):
    outcome = phase1.check(kernel, device=npu_lock)
    npu_record("phase1", outcome.payload)
    assert outcome.ok, outcome.message
