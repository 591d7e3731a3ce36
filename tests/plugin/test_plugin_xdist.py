"""pytest-xdist: one model per worker, events of workers, crashed workers."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("xdist")

THREE = """
@pytest.mark.phase1
def test_one(): pass
@pytest.mark.phase2
def test_two(deployment, npu_record):
    npu_record("worker", os.environ["PYTEST_XDIST_WORKER"])
@pytest.mark.phase3
def test_three(npu_record):
    npu_record("worker", os.environ["PYTEST_XDIST_WORKER"])
    npu_record("threads", os.environ["OMP_NUM_THREADS"])
"""


def records(suite, kind: str, model: str) -> list:
    return [record["payload"] for record in suite.results(model)["records"] if record["kind"] == kind]


def test_one_model_stays_on_one_worker_and_everything_reaches_the_report(suite):
    for name in ("one", "two", "six"):
        suite.model(name, a=THREE)
    result = suite.spawn("-n", "2", plugins="xdist")
    result.assert_outcomes(passed=9)
    workers = set()
    for name in ("one", "two", "six"):
        assert suite.outcomes(name) == {"test_one": "passed", "test_two": "passed", "test_three": "passed"}
        first, second = records(suite, "worker", name)
        assert first == second
        workers.add(first)
        assert suite.results(name)["deployment"]["checkpoint"]["kind"] == "tiny"
        assert {event.get("worker") for event in suite.events(name) if event["event"] == "test_phase"} == {
            first
        }
    assert workers == {"gw0", "gw1"}
    assert int(records(suite, "threads", "one")[0]) >= 1
    assert [line for line in result.outlines if line.startswith("npu: device")]


MEETS = """
@pytest.mark.phase6
def test_{name}(npu_record):
    npu_record("worker", os.environ["PYTEST_XDIST_WORKER"])
    open("{name}.seen", "w").close()
    end = time.monotonic() + 20
    while not os.path.exists("{other}.seen"):
        assert time.monotonic() < end, "the other module did not start meanwhile"
        time.sleep(0.05)
"""


def test_workers_share_a_model_when_one_phase_is_selected(suite):
    suite.model(a=MEETS.format(name="a", other="b"), b=MEETS.format(name="b", other="a"))
    suite.spawn("-n", "2", "-m", "phase6", plugins="xdist").assert_outcomes(passed=2)
    assert set(records(suite, "worker", "tiny")) == {"gw0", "gw1"}


def test_phase_blocks_on_a_worker(suite):
    suite.model(a=THREE.replace("def test_one(): pass", "def test_one(): assert 0"))
    suite.spawn("-n", "1", plugins="xdist").assert_outcomes(failed=1, skipped=2)
    assert suite.outcomes() == {"test_one": "failed", "test_two": "blocked", "test_three": "blocked"}


@pytest.mark.parametrize(
    "death",
    ["os._exit(3)", pytest.param("os.kill(os.getpid(), 9)", marks=pytest.mark.slow)],
    ids=["exit", "SIGKILL"],
)
def test_dead_worker_is_an_error_with_the_records_made_before_and_blocks_later_phases(suite, death):
    suite.model(
        a=f"""
@pytest.mark.phase1
def test_one(): pass
@pytest.mark.phase2
def test_dies(npu_record):
    npu_record("before", 42)
    {death}
@pytest.mark.phase3
def test_later(): pass
def test_plain(): pass
"""
    )
    result = suite.spawn("-n", "1", plugins="xdist")
    assert result.ret == 1
    result.assert_outcomes(passed=2, errors=1, skipped=1)  # in the terminal as in the reports
    expected = {"test_plain": "passed", "test_one": "passed", "test_dies": "crashed", "test_later": "blocked"}
    assert suite.outcomes() == expected
    assert records(suite, "before", "tiny") == [42]
    assert "crashed while running" in suite.results()["crashes"][0]["cause"]
    result.stdout.fnmatch_lines(["FAIL: 1 crashed, 2 passed, 1 blocked"])


def test_death_of_one_worker_blocks_later_phases_on_a_worker_that_runs_already(suite):
    dies = "".join(
        f"@pytest.mark.phase{n}\ndef test_{n}(): {'os._exit(1)' if n == 1 else 'time.sleep(0.2)'}\n"
        for n in range(1, 5)
    )
    suite.model("one", a="@pytest.mark.phase0\ndef test_0(): time.sleep(0.5)\n" + dies)
    suite.model("two", a="".join(f"def test_{n}(): time.sleep(0.4)\n" for n in range(5)))
    suite.spawn("-n", "2", plugins="xdist")
    assert suite.outcomes("one") == {
        "test_0": "passed",
        "test_1": "crashed",
        **dict.fromkeys(("test_2", "test_3", "test_4"), "blocked"),
    }
    assert set(suite.outcomes("two").values()) == {"passed"}


def test_performance_tests_are_deselected_with_the_reason(suite):
    suite.model(a="def test_perf(npu_benchmark): pass\ndef test_other(): pass")
    result = suite.spawn("-n", "1", plugins="xdist benchmark")
    result.assert_outcomes(passed=1)
    assert "automatically disabled" not in result.stdout.str() + result.stderr.str()
    result.stdout.fnmatch_lines(
        ["npu: 1 test(s) deselected: performance tests do not run under pytest-xdist*"]
    )
    assert suite.results()["deselected"][0]["nodeids"] == ["llms/tiny/tests/test_tiny_a.py::test_perf"]


def test_benchmark_only_with_n_is_a_usage_error(suite):
    suite.model(a="def test_perf(npu_benchmark): pass")
    result = suite.spawn("-n", "2", "--benchmark-only", plugins="xdist benchmark")
    assert result.ret == 4
    assert "xdist" in result.stderr.str()


@pytest.mark.slow
def test_choice_of_the_user_wins(suite):
    """With --dist=each every worker runs everything, the plugin does not interfere."""
    suite.model(a="def test_one(): pass")
    suite.spawn("-n", "2", "--dist=each", plugins="xdist").assert_outcomes(passed=2)


def test_unrelated_tests_next_to_models_are_spread(suite):
    suite.model(a=THREE)
    suite.pytester.makepyfile(
        test_free="import os, pytest\n@pytest.mark.parametrize('i', range(8))\ndef test_x(i): "
        "open(os.environ['PYTEST_XDIST_WORKER'], 'a').close()"
    )
    suite.spawn("-n", "2", plugins="xdist").assert_outcomes(passed=11)
    assert (suite.path / "gw0").exists()
    assert (suite.path / "gw1").exists()


@pytest.mark.slow
def test_shuffled_parallel_runs_give_the_same_verdicts(suite):
    pytest.importorskip("pytest_randomly")
    for name in ("one", "two"):
        suite.model(name, a=THREE, b="@pytest.mark.phase2\ndef test_bad(): assert 0\ndef test_plain(): pass")
    seen = []
    for seed in (1, 2, 3):
        suite.spawn("-n", "2", f"--randomly-seed={seed}", plugins="xdist randomly")
        seen.append(json.dumps([sorted(suite.outcomes(name).items()) for name in ("one", "two")]))
    assert len(set(seen)) == 1
    assert "blocked" in seen[0]
