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


def test_unknown_name_is_a_usage_error_that_says_what_was_meant(inner: pytest.Pytester) -> None:
    result = inner.runpytest_subprocess("--npu-fault", "rope_theta_tent")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*no fault 'rope_theta_tent'; did you mean rope_theta_tenth*faults list*"])


def test_verdict_report_and_index_say_that_a_fault_was_planted(suite) -> None:
    suite.model(a="@pytest.mark.phase6\ndef test_one(deployment): pass")
    suite.spawn("llms")
    clean = suite.runs()[-1].name
    result = suite.spawn("-q", "--npu-fault", "lm_head_hangs", "llms")
    label = "twin (modelled), FAULT PLANTED: lm_head_hangs"
    result.stdout.fnmatch_lines([f"device {label}; checkpoint *"])
    assert suite.results()["device"]["label"] == label
    assert label in (suite.runs()[-1] / "report.html").read_text()
    index = (suite.runs()[-1].parents[1] / "index.html").read_text()
    assert index.index(clean) < index.index(label)  # the verdict of the model is that of the clean run


def test_silicon_is_refused(inner: pytest.Pytester) -> None:
    result = inner.runpytest_subprocess("--npu", "--no-npu-supervise", "--npu-fault", "lm_head_hangs")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--npu-fault plants faults in the digital twin: leave out --npu*"])
