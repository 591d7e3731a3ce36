"""Markers, selection, order and blocking."""

from __future__ import annotations

import pytest

GATES = """
@pytest.mark.phase6
def test_six(): pass
@pytest.mark.phase2
def test_two(): assert os.environ.get("BREAK") != "2"
def test_plain(): pass
@pytest.mark.phase4
def test_four(): pass
@pytest.mark.phase0
def test_zero(): assert os.environ.get("BREAK") != "0"
"""


def order(result: pytest.RunResult) -> list[str]:
    return [line.split("::")[1].split()[0] for line in result.outlines if "::test" in line and "[" in line]


def test_phases_run_in_order_and_plain_tests_first(suite):
    suite.model(gates=GATES)
    result = suite.run("-v", "llms/tiny")
    result.assert_outcomes(passed=5)
    assert order(result) == ["test_plain", "test_zero", "test_two", "test_four", "test_six"]


def test_no_phase_order_keeps_the_order_of_collection(suite):
    suite.model(gates=GATES)
    assert order(suite.run("-v", "--no-phase-order"))[0] == "test_six"


def test_models_are_finished_one_by_one_and_foreign_tests_keep_their_place(suite):
    suite.model("one", a=GATES)
    suite.model("two", a=GATES)
    suite.pytester.makepyfile(test_zzz="def test_foreign(): pass")
    names = order(suite.run("-v", "llms/two", "test_zzz.py", "llms/one"))
    assert names[:5] == names[6:] == ["test_plain", "test_zero", "test_two", "test_four", "test_six"]
    assert names[5] == "test_foreign"


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
def test_phase_order_survives_pytest_randomly(suite, seed):
    pytest.importorskip("pytest_randomly")
    suite.model(gates=GATES)
    result = suite.pytester.runpytest_subprocess("-v", "-p", "no:hypothesispytest", f"--randomly-seed={seed}")
    names = order(result)
    assert [name for name in names if name != "test_plain"] == [
        "test_zero",
        "test_two",
        "test_four",
        "test_six",
    ]


def test_marker_selects_one_phase(suite):
    suite.model(gates=GATES)
    result = suite.run("-m", "phase6", "llms/tiny")
    result.assert_outcomes(passed=1, deselected=4)


def test_failed_phase_blocks_the_later_ones_with_the_reason(suite, monkeypatch):
    monkeypatch.setenv("BREAK", "2")
    suite.model(gates=GATES)
    result = suite.run("-rs")
    result.assert_outcomes(passed=2, failed=1, skipped=2)
    result.stdout.fnmatch_lines(
        ["SKIPPED*blocked: phase 2 block of tiny failed (llms/tiny/tests/*test_two)*"]
    )
    assert suite.outcomes() == {
        "test_plain": "passed",
        "test_zero": "passed",
        "test_two": "failed",
        "test_four": "blocked",
        "test_six": "blocked",
    }
    assert suite.results()["verdict"] == "FAIL"


def test_failed_phase_blocks_its_own_model_only(suite, monkeypatch):
    monkeypatch.setenv("BREAK", "0")
    suite.model("one", a=GATES)
    suite.model("two", a=GATES.replace("BREAK", "OTHER"))
    suite.run().assert_outcomes(passed=1 + 5, failed=1, skipped=3)


def test_no_phase_order_runs_what_would_be_blocked(suite, monkeypatch):
    monkeypatch.setenv("BREAK", "0")
    suite.model(gates=GATES)
    suite.run("--no-phase-order").assert_outcomes(passed=4, failed=1)


@pytest.mark.parametrize("place", ["setup", "teardown"])
def test_error_in_a_fixture_blocks_too(suite, place):
    before, after = ("assert 0", "") if place == "setup" else ("", "assert 0")
    suite.model(
        a=f"""
@pytest.fixture
def broken():
    {before or "pass"}
    yield
    {after or "pass"}
@pytest.mark.phase1
def test_one(broken): pass
@pytest.mark.phase2
def test_two(): pass
"""
    )
    result = suite.run()
    result.assert_outcomes(errors=1, skipped=1, passed=1 if place == "teardown" else 0)
    assert suite.outcomes() == {"test_one": "error", "test_two": "blocked"}


def test_rerun_that_passes_blocks_nothing(suite):
    pytest.importorskip("pytest_rerunfailures")
    suite.model(
        a="""
tries = []
@pytest.mark.phase1
def test_flaky():
    tries.append(1)
    assert len(tries) > 1
@pytest.mark.phase2
def test_later(): pass
"""
    )
    suite.run("--reruns", "2").assert_outcomes(passed=2)
    tests = {test["nodeid"][-5:]: test for test in suite.results()["tests"]}
    assert tests["flaky"]["reruns"] == 1
    assert tests["flaky"]["outcome"] == "passed"


def test_xfail_blocks_nothing_and_is_reported(suite):
    suite.model(
        a="""
@pytest.mark.phase1
@pytest.mark.xfail(reason="known")
def test_one(): assert 0
@pytest.mark.phase2
def test_two(): pass
"""
    )
    suite.run().assert_outcomes(passed=1, xfailed=1)
    assert suite.outcomes() == {"test_one": "xfailed", "test_two": "passed"}


def test_all_markers_are_registered(suite):
    text = suite.run("--markers").stdout.str()
    assert all(f"@pytest.mark.phase{number}:" in text for number in range(8))
