"""`--npu-fault`: one fault for a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(
        """
        from npu_twin import injection

        def test_armed(npu_options):
            assert npu_options.fault == "lm_head_hangs"
            assert [fault.hang for fault in injection.active] == [True]
        """
    )
    return pytester


def test_fault_is_planted_for_the_run_and_said(inner: pytest.Pytester) -> None:
    result = inner.runpytest_subprocess("--npu-fault", "lm_head_hangs")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["npu: FAULT PLANTED: lm_head_hangs, *"])


def test_nothing_is_planted_unless_asked_for(inner: pytest.Pytester) -> None:
    result = inner.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*FAULT PLANTED*")


def test_unknown_name_is_a_usage_error_that_lists_the_names(inner: pytest.Pytester) -> None:
    result = inner.runpytest_subprocess("--npu-fault", "gremlin")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*no fault 'gremlin'; known:", "*rope_theta_tenth"])


def test_silicon_is_refused(inner: pytest.Pytester) -> None:
    result = inner.runpytest_subprocess("--npu", "--no-npu-supervise", "--npu-fault", "lm_head_hangs")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--npu-fault plants faults in the digital twin: leave out --npu*"])
