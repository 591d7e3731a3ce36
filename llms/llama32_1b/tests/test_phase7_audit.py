"""Phase 7: the independent audit, in a process of its own and without caches."""

from pathlib import Path

import pytest

from llms.verify.gates import phase7 as audit

pytestmark = [pytest.mark.phase7, pytest.mark.slow]
FOLDER = Path(__file__).resolve().parents[1]


def test_independent_audit(npu_options, npu_record):
    outcome = audit.for_options(FOLDER, npu_options)
    npu_record("audit", outcome.payload)
    assert outcome.ok, outcome.message
