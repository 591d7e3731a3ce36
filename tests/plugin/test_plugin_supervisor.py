"""Hangs, crashes and interrupts under the supervisor."""

from __future__ import annotations

import signal
import time
import xml.etree.ElementTree as ET

import pytest

#: Waits in native code for a semaphore that nobody posts, and again after every signal; `PyDLL` keeps the
#: interpreter lock meanwhile, `CDLL` gives it up.
HANG = """
import ctypes
@pytest.mark.phase1
def test_before(): pass
@pytest.mark.phase2
def test_hangs(npu_device, npu_record):
    npu_record("before", 42)
    {how}
@pytest.mark.phase2
def test_device_later(npu_device): pass
@pytest.mark.phase2
def test_no_device(): pass
@pytest.mark.phase3
def test_blocked(): pass
"""
HOWS = {
    "native, interpreter lock held": "ctypes.PyDLL(None).sem_wait(ctypes.create_string_buffer(64))",
    "native": "ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64))",
    "native, goes on when asked for its stacks": "ctypes.CDLL(None).sleep(60)",
    "python": "time.sleep(60)",
    "signals ignored": (
        "import signal as s; [s.signal(n, s.SIG_IGN) for n in s.valid_signals() - {9, 19}]; time.sleep(60)"
    ),
}
SUPERVISED = ("--npu-supervise", "--npu-hang-timeout=3")


def counts(suite, file: str) -> dict[str, int]:
    node = ET.parse(file).getroot().find("testsuite")
    return {name: int(node.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}


def first_is_enough(values, ids):
    """The first case always, the others when slow tests are wanted."""
    cases = []
    for name, value in zip(ids, values, strict=True):
        marks = [pytest.mark.slow] if cases else []
        cases.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), id=name, marks=marks))
    return cases


@pytest.mark.parametrize("how", first_is_enough(HOWS.values(), HOWS))
def test_hang_is_an_error_with_stacks_and_the_rest_runs(suite, monkeypatch, how):
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    suite.model(a=HANG.format(how=how))
    result = suite.spawn("--npu", "--npu-hang-timeout=3", "--junitxml=user.xml")
    assert result.ret == 1
    assert suite.outcomes() == {
        "test_before": "passed",
        "test_hangs": "crashed",
        "test_device_later": "error",
        "test_no_device": "passed",
        "test_blocked": "blocked",
    }
    result.assert_outcomes(passed=2, errors=2, skipped=1)
    expected = {"tests": 5, "failures": 0, "errors": 2, "skipped": 1}
    assert counts(suite, suite.runs()[-1] / "junit.xml") == expected
    assert counts(suite, suite.path / "user.xml") == expected
    results = suite.results()
    assert "hung: no sign of progress for 3 s (call of llms/" in results["crashes"][0]["cause"]
    assert "hung" in results["poisoned"]
    assert next(r["payload"] for r in results["records"] if r["kind"] == "before") == 42
    later = next(test for test in results["tests"] if test["nodeid"].endswith("device_later"))
    assert "the device is not used any more in this run: hung" in later["reason"]
    page = (suite.runs()[-1] / "report.html").read_text()
    if "SIG_IGN" in how:
        assert "the process did not react" in page
    else:
        assert "in test_hangs" in page
    summary = "FAIL: 1 crashed, 1 error, 2 passed, 1 blocked*"
    result.stdout.fnmatch_lines([summary, "report: reports/tiny/*/report.html"])


DEATHS = {
    "exit": ("os._exit(7)", "the process died (exit code 7)"),
    "SIGKILL": ("os.kill(os.getpid(), 9)", "the process died (killed by SIGKILL)"),
    "segmentation fault": ("import ctypes; ctypes.string_at(0)", "the process died (killed by SIGSEGV)"),
}


@pytest.mark.parametrize(("how", "cause"), first_is_enough(DEATHS.values(), DEATHS))
def test_death_of_the_process_is_an_error_and_the_rest_runs(suite, how, cause):
    suite.model(a=HANG.format(how=how))
    suite.pytester.makepyfile(test_foreign="def test_foreign(): pass")
    result = suite.spawn("--npu-supervise", "test_foreign.py", "llms")
    assert suite.outcomes() == {
        "test_before": "passed",
        "test_hangs": "crashed",
        "test_device_later": "passed",  # nothing hung, and the twin is new in every process
        "test_no_device": "passed",
        "test_blocked": "blocked",
    }
    result.assert_outcomes(passed=4, errors=1, skipped=1)
    assert suite.results()["crashes"][0]["cause"] == cause
    if "string_at" in how:
        assert "in test_hangs" in (suite.runs()[-1] / "report.html").read_text()


def test_several_crashes_in_setup_call_and_teardown(suite):
    suite.model(
        a="""
@pytest.fixture
def dies_first(): os._exit(1)
@pytest.fixture
def dies_last():
    yield
    os._exit(1)
def test_1(): pass
def test_2(dies_first): pass
def test_3(): assert 0
def test_4(dies_last): pass
def test_5(): os._exit(1)
def test_6(): pass
"""
    )
    result = suite.spawn("--npu-supervise", "--html=page.html", plugins="metadata html")
    crashed = dict.fromkeys(("test_2", "test_4", "test_5"), "crashed")
    assert suite.outcomes() == {"test_1": "passed", "test_3": "failed", "test_6": "passed", **crashed}
    result.assert_outcomes(passed=2, failed=1, errors=3)
    page = (suite.path / "page.html").read_text()
    assert all(f"test_{number}" in page for number in range(1, 7))
    assert "This page is incomplete" not in page


def test_results_are_shown_first_whatever_the_order_of_the_next_process(suite):
    """Between real tests a replayed one would leave fixtures of other folders open."""
    conftest = suite.path / "conftest.py"
    conftest.write_text(
        conftest.read_text()
        + """
import pathlib
def pytest_collection_modifyitems(items):
    marker = pathlib.Path("second")
    if marker.exists():  # the crashed test and the one before it come between the others
        a, c, b, d = items
        items[:] = [c, a, b, d]
    else:
        a, c, b, d = items
        items[:] = [a, b, c, d]
    marker.touch()
"""
    )
    fixture = "@pytest.fixture(scope='module', autouse=True)\ndef place(): yield\n"
    for place, text in (("p/a", "pass"), ("q/b", "os._exit(1)"), ("p/c", "pass"), ("q/d", "pass")):
        (suite.path / place).mkdir(parents=True)
        code = f"import os, pytest\n{fixture}def test_1(): {text}\n"
        (suite.path / place / f"test_{place[-1]}.py").write_text(code)
    suite.spawn("--npu-supervise").assert_outcomes(passed=3, errors=1)


def test_healthy_supervised_run_is_like_any_other(suite):
    suite.model(a="@pytest.mark.phase1\ndef test_one(deployment, npu_record): npu_record('x', 1)")
    result = suite.spawn(*SUPERVISED)
    assert result.ret == 0
    result.assert_outcomes(passed=1)
    results = suite.results()
    assert (results["verdict"], results["exit_status"], results["counts"]) == ("PASS", 0, {"passed": 1})
    result.stdout.fnmatch_lines(["npu: reports in reports; supervised, hang limit 3 s"])


@pytest.mark.slow
def test_marker_sets_another_limit(suite):
    suite.model(
        a="""
@pytest.mark.npu_hang_timeout(30)
def test_slow(): time.sleep(3.4)
@pytest.mark.npu_hang_timeout(0)
def test_free(): time.sleep(3.4)
"""
    )
    suite.spawn(*SUPERVISED).assert_outcomes(passed=2)


def test_marker_without_a_number_is_a_usage_error(suite):
    suite.model(a="@pytest.mark.npu_hang_timeout\ndef test_x(): pass")
    result = suite.spawn()
    assert result.ret == 4
    assert "needs a number of seconds" in result.stderr.str()


@pytest.mark.slow
def test_waiting_for_the_lock_is_no_hang(suite, monkeypatch, tmp_path):
    import subprocess

    monkeypatch.setenv("STAND_IN_SILICON", "1")
    lock = tmp_path / "npu.lock"
    holder = subprocess.Popen(["flock", str(lock), "sleep", "9"])
    suite.model(a="def test_x(npu_device, npu_lock):\n    with npu_lock: pass")
    result = suite.spawn("--npu", "--npu-hang-timeout=3", f"--npu-lock={lock}")
    holder.wait()
    result.assert_outcomes(passed=1)


@pytest.mark.slow
def test_lock_is_free_after_a_hang(suite, monkeypatch, tmp_path):
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    lock = tmp_path / "npu.lock"
    suite.model(
        a="""
def test_hangs(npu_device, npu_lock):
    with npu_lock: time.sleep(60)
def test_next(npu_lock):
    with npu_lock: pass
"""
    )
    # The next test needs the lock. The device is poisoned, so it fails at once, not after a time-out.
    result = suite.spawn("--npu", "--npu-hang-timeout=3", f"--npu-lock={lock}")
    result.assert_outcomes(errors=2)
    assert suite.results()["tests"][1]["lock_wait_s"] == 0


@pytest.mark.slow
def test_hang_outside_of_tests_ends_the_run(suite):
    suite.model(a="time.sleep(60)\ndef test_x(): pass", b="def test_y(): pass")
    result = suite.spawn(*SUPERVISED)
    assert result.ret == 3
    result.stdout.fnmatch_lines(["npu supervisor: hung: no sign of progress for 12 s (outside of any test)*"])


@pytest.mark.slow
def test_hang_at_the_end_of_the_process_is_no_pass(suite):
    suite.model(a="import atexit\natexit.register(time.sleep, 60)\ndef test_x(): pass")
    result = suite.spawn(*SUPERVISED)
    assert result.ret == 3
    assert suite.results()["verdict"] == "FAIL"
    assert suite.outcomes() == {"test_x": "passed"}


def test_usage_error_is_passed_through(suite):
    suite.model(a="def test_x(): pass")
    assert suite.spawn("--npu-supervise", "--no-such-option").ret == 4
    assert suite.spawn("--npu-supervise", "-k", "nothing").ret == 5


def test_ctrl_c_reaches_the_child_and_leaves_a_report(suite):
    two = "def test_two(): print('now', flush=True); time.sleep(60)"
    suite.model(a=f"def test_one(): pass\n{two}\ndef test_three(): pass")
    process = suite.start("--npu-supervise", "-s")
    for line in process.stdout:
        if "now" in line:
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 2, out
    assert suite.outcomes() == {"test_one": "passed", "test_two": "interrupted", "test_three": "not run"}
    assert suite.results()["verdict"] == "INCOMPLETE"
    assert "report: reports/tiny" in out


def test_second_ctrl_c_ends_a_child_that_does_not_react(suite):
    suite.model(
        a="""
import signal
def test_one():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("now", flush=True)
    time.sleep(60)
"""
    )
    process = suite.start("--npu-supervise", "-s")
    for line in process.stdout:
        if "now" in line:
            break
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 2, out
    assert suite.outcomes() == {"test_one": "interrupted"}
    assert "was killed" in suite.results()["interrupts"][-1]


def test_child_dies_with_a_killed_supervisor(suite):
    suite.model(a="def test_one():\n    print('pid', os.getpid(), flush=True)\n    time.sleep(60)")
    process = suite.start("--npu-supervise", "-s")
    pid = next(int(line.split()[-1]) for line in process.stdout if "pid" in line)
    deadline = time.monotonic() + 30
    while '"test_start"' not in (suite.runs()[-1] / "events.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _alive(pid):
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_hang_of_an_xdist_worker_ends_that_worker_only(suite, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    suite.model("one", a=HANG.format(how="time.sleep(60)"))
    suite.model("two", a="def test_fine():\n    for _ in range(4): time.sleep(0.4)")
    result = suite.spawn("--npu", "--npu-hang-timeout=4", "-n", "2", plugins="xdist")
    assert result.ret == 1
    result.assert_outcomes(passed=3, errors=2, skipped=1)
    assert suite.outcomes("one") == {
        "test_before": "passed",
        "test_hangs": "crashed",
        "test_device_later": "error",
        "test_no_device": "passed",
        "test_blocked": "blocked",
    }
    assert suite.outcomes("two") == {"test_fine": "passed"}
    assert "hung: no sign of progress" in suite.results("one")["crashes"][0]["cause"]
    assert len(suite.results("one")["crashes"]) == 1
    result.stdout.fnmatch_lines(["hung: no sign of progress for 4 s*"])


@pytest.mark.slow
def test_run_inside_of_a_supervised_test_is_on_its_own(suite):
    suite.model(
        a="""
import subprocess, sys
def test_x(tmp_path):
    (tmp_path / "test_inner.py").write_text("def test_y(npu_record): npu_record('inner', 1)")
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "npu", str(tmp_path)], cwd=tmp_path)
    assert done.returncode == 0
    assert list(tmp_path.glob("reports/framework/*/report.html"))
"""
    )
    suite.spawn("--npu-supervise").assert_outcomes(passed=1)
    assert all(record["kind"] != "inner" for record in suite.results()["records"])


def test_unsupervised_unless_asked(suite):
    suite.model(a="def test_x(): assert 'PYTEST_NPU_SUPERVISOR_DIR' not in os.environ")
    result = suite.spawn()
    result.assert_outcomes(passed=1)
    assert "; supervised" not in result.stdout.str()
