"""syrupy, pytest-rerunfailures, pytest-timeout next to the plugin."""

from __future__ import annotations

import pytest

SNAPSHOTS = """
@pytest.fixture
def device_that_fails():
    if os.environ.get("BREAK") == "setup": raise OSError("device error")
def test_one(device_that_fails, snapshot):
    if os.environ.get("BREAK") == "call": raise OSError("device error")
    if os.environ.get("BREAK") == "exit": os._exit(1)
    assert "listing one" == snapshot
def test_two(snapshot):
    assert "listing two" == snapshot
"""


@pytest.mark.parametrize(
    ("place", "args"),
    [("setup", ()), pytest.param("call", (), marks=pytest.mark.slow), ("exit", ("--npu-supervise",))],
    ids=["setup", "call", "crash"],
)
def test_device_error_never_deletes_a_snapshot(suite, monkeypatch, place, args):
    pytest.importorskip("syrupy")
    folder = suite.model(a=SNAPSHOTS) / "tests" / "__snapshots__"
    suite.spawn("--snapshot-update", plugins="syrupy").assert_outcomes(passed=2)
    file = next(folder.iterdir())
    before = file.read_text()
    assert "listing one" in before
    assert "listing two" in before
    monkeypatch.setenv("BREAK", place)
    result = suite.spawn("--snapshot-update", *args, plugins="syrupy")
    assert result.ret == 1
    assert file.read_text() == before


def test_snapshot_of_a_removed_test_is_still_deleted(suite):
    pytest.importorskip("syrupy")
    folder = suite.model(a=SNAPSHOTS) / "tests" / "__snapshots__"
    suite.spawn("--snapshot-update", plugins="syrupy")
    suite.model(a=SNAPSHOTS.partition("def test_two")[0])
    suite.spawn("--snapshot-update", plugins="syrupy").assert_outcomes(passed=1)
    text = next(folder.iterdir()).read_text()
    assert "listing one" in text
    assert "listing two" not in text


BUSY = "DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed (err=-16): Device or resource busy"


@pytest.mark.parametrize(
    ("message", "failures", "outcome", "runs"),
    [(BUSY, 2, "passed", 3), (BUSY, 9, "failed", 3), ("cosine 0.2 below 0.99", 1, "failed", 1)],
    ids=["transient", "transient too often", "numeric"],
)
def test_only_named_transient_failures_are_run_again(suite, monkeypatch, message, failures, outcome, runs):
    pytest.importorskip("pytest_rerunfailures")
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    suite.model(
        a=f"""
tries = []
@pytest.mark.phase1
def test_x(npu_device):
    tries.append(1)
    if len(tries) <= {failures}:
        raise RuntimeError({message!r})
"""
    )
    suite.spawn("--npu", "--no-npu-supervise", plugins="rerunfailures")
    test = suite.results()["tests"][0]
    assert (test["outcome"], test["reruns"] + 1) == (outcome, runs)
    retries = [event for event in suite.events() if event["event"] == "retry"]
    assert [event["attempt"] for event in retries] == list(range(1, runs))
    page = (suite.runs()[-1] / "report.html").read_text()
    assert ("Run again" in page) == (runs > 1)


def test_nothing_is_run_again_on_the_twin(suite):
    pytest.importorskip("pytest_rerunfailures")
    suite.model(a=f"def test_x(npu_device): raise RuntimeError({BUSY!r})")
    suite.spawn(plugins="rerunfailures").assert_outcomes(failed=1)
    assert suite.results()["tests"][0]["reruns"] == 0


def test_latency_equal_to_the_drivers_time_out_is_a_failure(suite, monkeypatch):
    pytest.importorskip("pytest_benchmark")
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    suite.model(
        a="""
@pytest.mark.parametrize("seconds", [5.5, 6.12])
def test_x(npu_benchmark, device_clock, seconds):
    def run(): device_clock.seconds += seconds
    npu_benchmark(run, rounds=2)
"""
    )
    result = suite.spawn("--npu", "--no-npu-supervise", plugins="benchmark")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["2 of 2 rounds took 6.12 s, the driver's time-out*"])
    suite.spawn(plugins="benchmark").assert_outcomes(passed=2)  # the twin's clock knows no such time-out


def test_pytest_timeout_ends_a_test_that_it_can_end(suite):
    pytest.importorskip("pytest_timeout")
    suite.model(
        a="@pytest.mark.phase1\ndef test_x(): time.sleep(60)\n@pytest.mark.phase2\ndef test_y(): pass"
    )
    suite.spawn("--timeout=1", plugins="timeout").assert_outcomes(failed=1, skipped=1)
    assert suite.outcomes() == {"test_x": "failed", "test_y": "blocked"}


def test_pytest_timeout_that_ends_the_process_leaves_a_result_under_a_supervisor(suite):
    pytest.importorskip("pytest_timeout")
    suite.model(a="def test_x(): time.sleep(60)\ndef test_y(): pass")
    args = ("--timeout=1", "--timeout-method=thread", "--npu-supervise")
    suite.spawn(*args, plugins="timeout").assert_outcomes(errors=1, passed=1)
    assert suite.outcomes() == {"test_x": "crashed", "test_y": "passed"}


def test_reruns_of_the_user_count_once_in_every_report(suite):
    pytest.importorskip("pytest_rerunfailures")
    pytest.importorskip("xdist")
    suite.model(
        a="n = []\n@pytest.mark.flaky(reruns=2)\ndef test_x():\n    n.append(1)\n    assert len(n) > 1"
    )
    result = suite.spawn("-n", "1", "--npu-supervise", plugins="xdist rerunfailures")
    result.stdout.fnmatch_lines(["*1 passed, 1 rerun*"])
    assert suite.results()["counts"] == {"passed": 1}
    assert suite.results()["tests"][0]["reruns"] == 1


GATEWAYS = {
    "several hosts": ("--tx=popen//id=host1", "--tx=popen//id=host2"),
    "as on one host": ("--tx=2*popen",),
}


@pytest.mark.parametrize("tx", GATEWAYS.values(), ids=GATEWAYS)
def test_local_gateways_in_the_form_of_remote_ones(suite, tx):
    """`--tx` as for several hosts; results of all gateways come together on the controller."""
    pytest.importorskip("xdist")
    suite.model("one", a="def test_x(npu_record): npu_record('where', os.getcwd())")
    suite.model("two", a="def test_x(npu_record): npu_record('where', os.getcwd())")
    result = suite.spawn("--dist=load", *tx, plugins="xdist")
    result.assert_outcomes(passed=2)
    ran = [
        event["worker"]
        for name in ("one", "two")
        for event in suite.events(name)
        if event["event"] == "test_start"
    ]
    expected = {"host1", "host2"} if len(tx) == 2 else {"gw0", "gw1"}
    assert set(ran) == expected
    assert suite.results("one")["workers"].keys() == expected
    assert f"{ran[0]} on " in (suite.runs("one")[-1] / "report.html").read_text()


def test_gateway_in_another_folder_with_its_own_lock_file(suite, monkeypatch, tmp_path):
    """Two NPUs: each gateway has its own lock, so nobody waits for the other's device."""
    pytest.importorskip("xdist")
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    work = """
def test_x(npu_device, npu_lock):
    with npu_lock:
        time.sleep(1)
"""
    suite.model("one", a=work)
    suite.model("two", a=work)
    tx = [f"--tx=popen//id=host{n}//env:NPU_LOCK_FILE={tmp_path / str(n)}" for n in (1, 2)]
    result = suite.spawn("--npu", "--no-npu-supervise", "--dist=load", *tx, plugins="xdist")
    result.assert_outcomes(passed=2)
    waits = [suite.results(name)["tests"][0]["lock_wait_s"] for name in ("one", "two")]
    assert max(waits) < 0.5
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}


def test_gateway_without_a_device_says_so(suite, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    suite.model(a="def test_x(npu_device): pass")
    tx = "--tx=popen//id=host1//env:STAND_IN_SILICON="
    result = suite.spawn("--npu", "--no-npu-supervise", "--dist=load", tx, plugins="xdist")
    assert result.ret == 4  # pytest-xdist alone starts such a worker again without end
    result.stderr.fnmatch_lines(["*worker host1: --npu: no usable NPU: pyxrt cannot be imported.*"])


def test_checks_of_another_host_are_in_the_report(suite, monkeypatch):
    """A worker that believes to be elsewhere checks its own host, and its findings name it."""
    pytest.importorskip("xdist")
    conftest = suite.path / "conftest.py"
    conftest.write_text(
        conftest.read_text()
        + """
import platform
if os.environ.get("PYTEST_XDIST_WORKER") == "host2":
    platform.node = lambda: "strix-08"
def pytest_npu_preflight(device):
    return [{"name": "firmware", "value": os.environ.get("PYTEST_XDIST_WORKER", "controller"), "ok": None,
             "remedy": ""}]
"""
    )
    suite.model("one", a="def test_x(): pass")
    suite.model("two", a="def test_x(): pass")
    tx = ("--tx=popen//id=host1", "--tx=popen//id=host2")
    suite.spawn("--dist=load", *tx, plugins="xdist").assert_outcomes(passed=2)
    facts = {fact["name"]: fact["value"] for fact in suite.results("one")["preflight"]}
    assert facts["firmware"] == "controller"
    assert facts["strix-08: firmware"] == "host2"
    assert suite.results("one")["workers"]["host2"] == "strix-08"
