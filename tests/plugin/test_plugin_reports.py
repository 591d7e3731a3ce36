"""Event log and reports: counts are right whatever ends a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import pytest

MIXED = """
@pytest.fixture
def bad_setup(): raise OSError("no such weights")
@pytest.fixture
def bad_teardown():
    yield
    raise OSError("cannot close")
@pytest.mark.phase0
def test_good(): pass
def test_bad():
    print("said before failing")
    assert "npu" == "hf", "<b>not bold</b> & 'quoted'"
def test_setup(bad_setup): pass
def test_teardown(bad_teardown): pass
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
"""


def junit_counts(suite, model: str = "tiny") -> dict[str, int]:
    node = ET.parse(suite.runs(model)[-1] / "junit.xml").getroot().find("testsuite")
    return {name: int(node.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}


def wait_for(condition, limit: float = 90.0):
    start = time.monotonic()
    while not (value := condition()):
        assert time.monotonic() - start < limit, "waited in vain"
        time.sleep(0.05)
    return value


def log_text(suite, model: str = "tiny") -> str:
    runs = suite.runs(model)
    log = runs[-1] / "events.jsonl" if runs else None
    return log.read_text() if log is not None and log.exists() else ""


def test_counts_agree_in_terminal_json_junit_and_html(suite):
    suite.model(a=MIXED)
    result = suite.run()
    result.assert_outcomes(passed=2, failed=1, errors=2, skipped=1)
    assert suite.outcomes() == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_setup": "error",
        "test_teardown": "error",
        "test_skipped": "skipped",
    }
    assert junit_counts(suite) == {"tests": 5, "failures": 1, "errors": 2, "skipped": 1}
    result.stdout.fnmatch_lines(
        ["FAIL: 2 error, 1 failed, 1 passed, 1 skipped", "report: reports/tiny/*/report.html"]
    )
    html = (suite.runs()[-1] / "report.html").read_text()
    assert "2 error, 1 failed, 1 passed, 1 skipped" in html
    assert "no such weights" in html
    assert "said before failing" in html
    assert "&lt;b&gt;not bold&lt;/b&gt;" in html
    assert "<b>not bold" not in html
    markdown = (suite.runs()[-1] / "evaluation_report.md").read_text()
    assert markdown.startswith("# tiny: FAIL")
    assert "cannot close" in markdown


def test_event_log_has_a_version_a_sequence_and_the_documented_events(suite):
    from pytest_npu.core import events as module

    suite.model(a=MIXED)
    suite.run()
    events = suite.events()
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert {event["v"] for event in events} == {1}
    assert all(event["model"] == "tiny" for event in events)
    assert events[0]["event"] == "session_start"
    assert events[-1] == {**events[-1], "event": "session_finish", "exit_status": 1}
    documented = set(re.findall(r"^(\w+)  +\w", module.__doc__, flags=re.M))
    assert {event["event"] for event in events} <= documented


def test_events_are_on_disk_while_the_test_runs(suite):
    suite.model(
        a="""
import pathlib
def test_one(): pass
def test_two():
    text = next(pathlib.Path("reports/tiny").glob("*/events.jsonl")).read_text()
    assert '"test_finish"' in text and text.count('"test_start"') == 2
"""
    )
    suite.run().assert_outcomes(passed=2)


def test_module_that_cannot_be_imported_is_an_error_of_its_model(suite):
    suite.model(a="import nothing_of_that_name", b="def test_one(): pass")
    result = suite.run("--continue-on-collection-errors")
    result.assert_outcomes(errors=1, passed=1)
    assert suite.results()["verdict"] == "FAIL"
    assert suite.results()["counts"] == {"error": 1, "passed": 1}
    assert junit_counts(suite)["errors"] == 1
    suite.run()  # without the option pytest stops after the collection: nothing ran, nothing passes
    assert suite.results()["verdict"] == "FAIL"


def test_run_without_any_passed_test_is_no_pass(suite):
    suite.model(a="@pytest.mark.skip\ndef test_one(): pass")
    suite.run()
    assert suite.results()["verdict"] == "EMPTY"


@pytest.mark.parametrize("args", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_ctrl_c_leaves_a_report(suite, args):
    suite.model(a="def test_one(): pass\ndef test_two(): time.sleep(60)\ndef test_three(): pass")
    process = suite.start(*args, plugins="xdist" if args else "")
    wait_for(lambda: '"test_start"' in log_text(suite) and "test_two" in log_text(suite).splitlines()[-1])
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 2, out
    assert suite.outcomes() == {"test_one": "passed", "test_two": "interrupted", "test_three": "not run"}
    assert suite.results()["verdict"] == "INCOMPLETE"
    assert "interrupted by the user" in suite.results()["interrupts"][0]
    assert junit_counts(suite) == {"tests": 3, "failures": 0, "errors": 1, "skipped": 1}
    assert "INCOMPLETE" in (suite.runs()[-1] / "report.html").read_text()
    assert "report: reports/tiny" in out


def test_killed_run_can_be_rendered_afterwards(suite):
    suite.model(a="def test_one(): pass\ndef test_two(): time.sleep(60)")
    process = suite.start()
    wait_for(lambda: re.search('"test_start".*test_two', log_text(suite)))
    process.kill()
    process.communicate(timeout=90)
    folder = suite.runs()[-1]
    assert not (folder / "report.html").exists()
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"v": 1, "seq": 99, "torn')
    command = [sys.executable, "-m", "pytest_npu.report", str(suite.path / "reports")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "INCOMPLETE" in done.stdout
    assert suite.outcomes() == {"test_one": "passed", "test_two": "interrupted"}
    assert "the run ended without finishing" in (folder / "report.html").read_text()
    assert "tiny" in (suite.path / "reports" / "index.html").read_text()


def test_killed_run_shows_in_the_index_before_it_is_rendered(suite):
    suite.model(a="def test_one(): pass")
    suite.run()
    folder = suite.runs()[-1]
    dead = folder.with_name("00000000-dead")
    dead.mkdir()
    lines = (folder / "events.jsonl").read_text().splitlines()
    (dead / "events.jsonl").write_text("\n".join(lines[:-3]) + "\n")
    suite.run()
    index = (suite.path / "reports" / "index.html").read_text()
    assert "00000000-dead" in index
    assert "INCOMPLETE" in index


def test_renderer_names_what_it_cannot_read(tmp_path):
    from pytest_npu.report.__main__ import main

    assert main([str(tmp_path)]) == 2
    run = tmp_path / "m" / "r"
    run.mkdir(parents=True)
    for text in ('{"v": 99, "seq": 0, "event": "x"}\n', "not json\nnor this\n{}\n"):
        (run / "events.jsonl").write_text(text)
        assert main([str(tmp_path)]) == 2


def test_full_disk_keeps_the_verdicts_and_says_what_is_missing(suite):
    """os.write fails as it does on a full disk, after the first events."""
    suite.model(a=MIXED)
    conftest = suite.path / "conftest.py"
    conftest.write_text(
        conftest.read_text()
        + """
import errno
real = os.write
count = []
def full(fd, data):
    if b'"event"' in data:
        count.append(1)
        if len(count) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
    return real(fd, data)
os.write = full
"""
    )
    result = suite.spawn()
    result.assert_outcomes(passed=2, failed=1, errors=2, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "FAIL: 2 error, 1 failed, 1 passed, 1 skipped",
            "event log: incomplete on disk (No space left on device)*",
        ]
    )
    assert suite.outcomes()["test_teardown"] == "error"


def test_report_folder_that_cannot_be_written_falls_back_to_the_temporary_folder(
    suite, monkeypatch, tmp_path
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (suite.path / "reports").write_text("a file where the folder should be")
    suite.model(a="def test_one(): pass")
    result = suite.spawn()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["report: *cannot be written*hence this folder"])
    assert list(tmp_path.glob("pytest-npu-reports-*/tiny/*/report.html"))


def test_record_of_an_unexpected_shape_does_not_take_the_run_down(suite):
    suite.model(a="def test_one(npu_record): npu_record('topk_gate', {'prompts': 'none'})")
    result = suite.run()
    result.assert_outcomes(passed=1)
    assert suite.outcomes() == {"test_one": "passed"}
    assert "topk_gate, unexpected shape" in (suite.runs()[-1] / "report.html").read_text()


def test_two_runs_at_once_share_nothing_but_the_index(suite):
    suite.model(a="def test_one(): time.sleep(0.3)")
    processes = [suite.start() for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len(suite.runs()) == 3
    assert all(json.loads((run / "results.json").read_text())["verdict"] == "PASS" for run in suite.runs())


def test_internal_error_of_a_plugin_is_in_the_report(suite):
    suite.model(a="def test_one(): pass")
    conftest = suite.path / "conftest.py"
    conftest.write_text(
        conftest.read_text() + "\ndef pytest_runtest_logfinish(nodeid): raise ValueError('plugin bug')\n"
    )
    result = suite.spawn()
    result.stderr.fnmatch_lines(["report: reports/tiny/*/report.html"])
    assert any("plugin bug" in crash["detail"] for crash in suite.results()["crashes"])
    assert suite.results()["verdict"] == "FAIL"


def test_environment_is_not_touched(suite):
    before = dict(os.environ)
    suite.model(a="def test_one(): pass")
    suite.run()
    assert {k: v for k, v in os.environ.items() if "NPU" in k} == {
        k: v for k, v in before.items() if "NPU" in k
    }


def test_full_disk_at_the_end_puts_the_reports_into_the_temporary_folder(suite, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    suite.model(a=MIXED)
    conftest = suite.path / "conftest.py"
    full = """
import errno, pathlib
real = pathlib.Path.write_text
def full(self, *args, **keywords):
    if "/reports/tiny/" in str(self):
        raise OSError(errno.ENOSPC, "No space left on device")
    return real(self, *args, **keywords)
pathlib.Path.write_text = full
"""
    conftest.write_text(conftest.read_text() + full)
    result = suite.spawn()
    result.stdout.fnmatch_lines(["report: *cannot be written (No space left on device), hence this folder"])
    (folder,) = tmp_path.glob("pytest-npu-reports-*/tiny/*")
    assert json.loads((folder / "results.json").read_text())["counts"]["passed"] == 1
    assert ET.parse(folder / "junit.xml").getroot().find("testsuite").attrib["errors"] == "2"
    assert "FAIL" in (folder / "report.html").read_text()


def test_second_ctrl_c_leaves_a_report(suite):
    """The session of pytest does not come to its end then."""
    suite.model(
        a="""
@pytest.fixture(autouse=True)
def slow_end():
    yield
    print("ending", flush=True)
    time.sleep(60)
def test_one(): pass
def test_two(): pass
"""
    )
    process = suite.start("-s")
    for line in process.stdout:
        if "ending" in line:
            break
    process.send_signal(signal.SIGINT)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0, out
    assert suite.results()["verdict"] == "INCOMPLETE"
    assert suite.outcomes() == {"test_one": "interrupted", "test_two": "not run"}
    assert "report: reports/tiny" in out


@pytest.mark.parametrize(
    ("args", "plugins", "reason"),
    [((), "", "1 error during collection"), (("-n", "1", "-x"), "xdist", "stopping after 1 failures")],
)
def test_session_that_pytest_stops_is_not_blamed_on_the_user(suite, args, plugins, reason):
    suite.model(a="def test_one(): assert 0\ndef test_two(): pass", b="" if args else "def (:")
    result = suite.spawn(*args, plugins=plugins)
    assert "Ctrl-C" not in result.stdout.str()
    assert suite.results()["interrupts"] == [reason]


IDS = ["\u00e4\n\x1b[31m<b>", "\u65e5\u672c\u8a9e", "x" * 9000, "a/b::c|`d`", "\ud800", "]]>&"]


@pytest.mark.parametrize(("args", "plugins"), [((), ""), (("-n", "1", "--npu-supervise"), "xdist")])
def test_ids_of_any_kind_reach_every_report(suite, args, plugins):
    ids = ascii(IDS)
    cases = f"@pytest.mark.parametrize('x', {ids}, ids=lambda v: v)"
    suite.model(a=f"{cases}\ndef test_x(x, npu_record): npu_record('x', x)")
    suite.spawn(*args, plugins=plugins).assert_outcomes(passed=len(IDS))
    assert suite.results()["counts"] == {"passed": len(IDS)}
    assert junit_counts(suite)["tests"] == len(IDS)
    assert "<b>" not in (suite.runs()[-1] / "report.html").read_text()
    assert (suite.runs()[-1] / "evaluation_report.md").exists()


def test_file_of_the_user_in_a_missing_folder(suite):
    suite.model(a="def test_one(): pass")
    suite.spawn("--npu-supervise", "--junitxml=new/sub/j.xml").assert_outcomes(passed=1)
    assert (suite.path / "new" / "sub" / "j.xml").exists()


@pytest.mark.parametrize("supervise", [(), ("--npu-supervise",)])
def test_odd_environment(suite, monkeypatch, supervise):
    suite.model(a="def test_one(npu_device): pass")
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    monkeypatch.setenv("HOME", "/proc")
    suite.spawn(*supervise, "-p", "no:terminal")
    assert suite.results()["verdict"] == "PASS"


@pytest.mark.parametrize("supervise", [(), ("--npu-supervise",)])
def test_run_from_another_folder_with_another_root(suite, monkeypatch, tmp_path, supervise):
    model = suite.model(a="def test_one(deployment): assert deployment.folder.name == 'tiny'")
    monkeypatch.chdir(tmp_path)
    suite.spawn(*supervise, f"--rootdir={suite.path}", "-c", str(suite.path / "tox.ini"), str(model))
    assert suite.results()["counts"] == {"passed": 1}


def test_last_failed_runs_what_failed(suite, monkeypatch):
    first = "@pytest.mark.phase1\ndef test_one(): assert os.environ.get('FIXED')\n"
    suite.model(a=f"{first}@pytest.mark.phase2\ndef test_two(): pass")
    suite.spawn().assert_outcomes(failed=1, skipped=1)
    monkeypatch.setenv("FIXED", "1")
    suite.spawn("--lf").assert_outcomes(passed=1)
    assert suite.outcomes() == {"test_one": "passed"}
