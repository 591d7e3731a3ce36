"""Which phases of a run may have a verdict in the gate ledger: whole ones, and those that failed."""

from __future__ import annotations

from typing import Any

import pytest
from pytest_npu.ledger.feature import verdicts_of
from pytest_npu.report.model import RunReport, TestResult

FIRST = """
pytestmark = pytest.mark.phase1

@pytest.mark.parametrize("n", [1, 2])
def test_kernel(n, npu_record): pass

@pytest.mark.slow
def test_every_length(npu_record): pass
"""
SECOND = """
@pytest.mark.phase1
def test_other(npu_record): pass

@pytest.mark.phase2
def test_block(npu_record): pass
"""


def whole(suite: Any) -> list[int]:
    (event,) = (event for event in suite.events() if event["event"] == "collected")
    assert event["folder"] == str(suite.path / "llms" / "tiny")
    found: list[int] = event["whole"]
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), [1, 2]),
        (("-m", "phase2"), [2]),
        (("-m", "phase1 or phase2"), [1, 2]),
        (("-m", "not slow"), [1, 2]),
        (("-k", "not other"), [2]),
        (("-k", "kernel"), []),
        (("llms/tiny/tests/test_tiny_a.py",), []),
        (("llms/tiny/tests/test_tiny_b.py",), [2]),
        (("llms/tiny/tests/test_tiny_b.py::test_block",), []),
        (("llms", "--deselect", "llms/tiny/tests/test_tiny_a.py::test_kernel[1]"), [2]),
        (("llms", "--ignore", "llms/tiny/tests/test_tiny_a.py"), [2]),
    ],
)
def test_phases_that_run_as_a_whole(suite: Any, arguments: tuple[str, ...], expected: list[int]) -> None:
    suite.pytester.makeini("[pytest]\nmarkers =\n    slow: long")
    suite.model(a=FIRST, b=SECOND)
    suite.run(*arguments)
    assert whole(suite) == expected


def test_workers_of_xdist_say_it_too(suite: Any) -> None:
    pytest.importorskip("xdist")
    suite.pytester.makeini("[pytest]\nmarkers =\n    slow: long")
    suite.model(a=FIRST, b=SECOND)
    suite.spawn("-n", "1", "-k", "not other", plugins="xdist")
    assert whole(suite) == [2]


def report(**changes: Any) -> RunReport:
    found = RunReport("tiny", finished=True)
    outcomes = {"a": (0, "passed"), "b": (1, "passed"), "c": (2, "failed"), "d": (3, "blocked")}
    for name, (phase, outcome) in outcomes.items():
        found.tests[name] = TestResult(name, phase, outcome=outcome, started=True, finished=True)
    for key, value in changes.items():
        setattr(found, key, value)
    return found


def test_a_part_that_passed_is_no_verdict_and_a_part_that_failed_is_one() -> None:
    events = [{"event": "collected", "whole": [0, 3]}]
    assert verdicts_of(report(), events) == {0: "PASS", 2: "FAIL"}


@pytest.mark.parametrize("changes", [{"finished": False}, {"interrupts": ["Ctrl-C"]}])
def test_a_run_that_did_not_end_passes_nothing(changes: dict[str, Any]) -> None:
    events = [{"event": "collected", "whole": [0, 1, 2, 3]}]
    assert verdicts_of(report(**changes), events) == {2: "FAIL"}
