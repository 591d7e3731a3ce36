"""The NPU lock against other processes, flock(1), ancestors, forks, kills and foreign files."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from pytest_npu import LockTimeout
from pytest_npu.device.lock import LockConfig, NpuLock

HOLD = """
import os, sys, time
from pathlib import Path
from pytest_npu.device.lock import LockConfig, NpuLock
lock = NpuLock(LockConfig(Path(sys.argv[1]), timeout=float(sys.argv[2])))
lock.acquire()
print("held", flush=True)
time.sleep(float(sys.argv[3]))
lock.release()
print("released", flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "npu.lock"


def quick(path: Path, timeout: float = 0.2, **fields) -> NpuLock:
    return NpuLock(LockConfig(path, timeout, poll=0.01, **fields))


def is_free(path: Path) -> bool:
    """Asked with an own descriptor, the way flock(1) would."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def hold(path: Path, seconds: float = 60, timeout: float = 10, script: str = HOLD) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path), str(timeout), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def hold_with_flock_1(path: Path) -> subprocess.Popen:
    """flock(1) in a process group of its own, so that its child can be ended with it."""
    command = ["flock", str(path), "sh", "-c", "echo held; exec sleep 60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_lock_is_a_flock_that_is_gone_after_release(path):
    with quick(path) as lock:
        assert lock.held
        assert not is_free(path)
    assert is_free(path)
    assert path.exists(), "the file of a lock must never be deleted"


def test_held_by_another_process_ends_in_a_time_out_that_names_it(path):
    process = hold(path)
    try:
        lock = quick(path)
        start = time.monotonic()
        with pytest.raises(LockTimeout) as caught:
            lock.acquire()
        assert 0.2 <= time.monotonic() - start < 2
        assert f"pid {process.pid}" in caught.value.holder
        assert sys.executable in caught.value.holder
        assert os.uname().nodename in caught.value.holder
        assert time.strftime(" since %Y-%m-%d") in caught.value.holder
        assert "--npu-lock-timeout" in str(caught.value)
        assert not lock.held
    finally:
        process.kill()
        process.wait()


def test_waits_for_the_holder_and_counts_the_time(path):
    process = hold(path, seconds=0.5)
    told = []
    lock = NpuLock(
        LockConfig(path, 10, poll=0.01, hint_after=0.1, hint_every=0.1), lambda *event: told.append(event)
    )
    with lock:
        pass
    assert 0.2 < lock.waited_s < 5
    actions = [action for action, _ in told]
    assert actions[0] == "waiting"
    assert actions[-2:] == ["acquired", "released"]
    assert f"pid {process.pid}" in told[0][1]["holder"]
    process.wait()


def test_flock_1_waits_for_us_and_we_for_flock_1(path):
    with quick(path):
        assert subprocess.run(["flock", "-n", path, "true"], check=False).returncode == 1
    shell = hold_with_flock_1(path)
    try:
        with pytest.raises(LockTimeout, match=f"pid {shell.pid} \\(flock"):
            quick(path).acquire()
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    with quick(path):
        pass


ONCE = "import sys; sys.argv += ['0.5', '0']\n" + HOLD


@pytest.mark.parametrize(
    "command",
    [
        "flock {lock} {python} -c '{code}' {lock}",
        "flock -o {lock} {python} -c '{code}' {lock}",
        "exec 9>{lock}; flock 9; {python} -c '{code}' {lock}; exit $?",
        "flock {lock} sh -c '{python} {runner} {lock}; exit $?'",
    ],
    ids=["inherited descriptor", "descriptor closed", "descriptor of a shell", "grandchild"],
)
def test_lock_of_an_ancestor_counts_as_held(path, tmp_path, command):
    runner = tmp_path / "runner.py"
    runner.write_text(ONCE)
    code = ONCE.replace("'", '"')
    text = command.format(lock=path, python=sys.executable, code=code, runner=runner)
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout == "held\nreleased\n", done.stderr
    assert is_free(path)


def test_release_keeps_the_lock_of_the_ancestor(path):
    script = (
        HOLD
        + "\nimport subprocess\nsys.exit(subprocess.run(['flock', '-n', sys.argv[1], 'true']).returncode)\n"
    )
    command = ["flock", str(path), sys.executable, "-c", script, str(path), "1", "0"]
    assert subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 1


def test_siblings_below_a_lock_holding_ancestor_exclude_each_other(path, tmp_path):
    runner = tmp_path / "runner.py"
    runner.write_text(HOLD)
    one = f"{sys.executable} {runner} {path}"
    text = f"{one} 10 1 & sleep 0.7; {one} 0.1 0; echo second $?; wait"
    done = subprocess.run(
        ["flock", path, "sh", "-c", text], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout.startswith("held\nsecond 1\n"), done.stdout + done.stderr
    assert "LockTimeout" in done.stderr


def test_killed_holder_leaves_a_free_lock_even_with_a_forked_child_alive(path):
    script = HOLD.replace(
        'print("held"',
        'pid = os.fork()\nif pid == 0: time.sleep(60)\nprint(pid, flush=True)\nprint("held"',
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path), "10", "60"], stdout=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    try:
        assert process.stdout.readline() == "held\n"
        assert not is_free(path)
        process.kill()
        process.wait()
        os.kill(child, 0)  # it is alive
        with quick(path, 2):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_forked_child_does_not_free_the_lock_of_its_parent(path):
    with quick(path):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert not is_free(path)


def test_child_process_does_not_inherit_the_descriptor(path):
    with quick(path):
        code = (
            "import os; print(*(os.readlink(e.path) for e in os.scandir('/proc/self/fd') if e.is_symlink()))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], close_fds=False, capture_output=True, text=True, check=False
        )
    assert str(path) not in done.stdout


def test_read_only_file_of_another_user_is_enough():
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    path = folder / "npu.lock"
    path.write_text("")
    path.chmod(0o444)
    folder.chmod(0o755)
    drop = "os.setgid(65534); os.setuid(65534)\n" if os.getuid() == 0 else ""
    check = drop + "assert not os.access(sys.argv[1], os.W_OK)\nlock = NpuLock("
    process = hold(path, script=HOLD.replace("lock = NpuLock(", check))
    try:
        assert not is_free(path)
        assert path.stat().st_mode & 0o777 == 0o444
        with pytest.raises(LockTimeout, match=f"pid {process.pid}"):
            quick(path).acquire()
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def test_new_file_is_open_to_other_users_whatever_the_umask(path):
    old = os.umask(0o077)
    try:
        with quick(path):
            assert path.stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(old)


def test_two_objects_of_one_process_do_not_block_each_other(path):
    first, second = quick(path), quick(path)
    with first, second, first:
        assert not is_free(path)
        second.release()
        assert not is_free(path)
        second.acquire()
    assert is_free(path)


def test_release_without_acquire_is_an_error(path):
    with pytest.raises(RuntimeError, match="not acquired"):
        quick(path).release()


def test_replaced_file_does_not_give_two_holders(path):
    """Somebody deletes the file between our open and our flock: the lock must be that of the new file."""
    real = fcntl.flock
    calls = []

    def flock(fd, operation):
        calls.append(fd)
        if len(calls) == 1:
            path.unlink()
            path.write_text("")
        return real(fd, operation)

    path.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        lock = quick(path, 2)
        lock.acquire()
    assert not is_free(path)
    lock.release()


def test_missing_folder_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere/npu\.lock"):
        quick(tmp_path / "nowhere" / "npu.lock").acquire()


def test_note_in_the_file_is_gone_after_release_and_stale_notes_are_not_believed(path):
    with quick(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert path.read_text() == ""
    path.write_text(json.dumps({"pid": 1, "command": "old", "host": "elsewhere", "since": "yesterday"}))
    shell = hold_with_flock_1(path)
    try:
        with pytest.raises(LockTimeout) as caught:
            quick(path).acquire()
        assert f"pid {shell.pid}" in caught.value.holder
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


RACE = """
import os, sys, time
from pathlib import Path
from pytest_npu.device.lock import LockConfig, NpuLock
lock, marks = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(5):
    with NpuLock(LockConfig(lock, timeout=60, poll=0.002)):
        fd = os.open(marks / "inside", os.O_CREAT | os.O_EXCL)  # fails when two are inside
        os.close(fd)
        time.sleep(0.003)
        (marks / "inside").unlink()
with (marks / "done").open("a") as file:
    file.write("x")
"""


def test_ten_processes_race_and_only_one_is_ever_inside(path, tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(path), str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        for _ in range(10)
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 10, errors
    assert (tmp_path / "done").read_text() == "x" * 10


def test_default_lock_does_not_follow_tmpdir(suite, monkeypatch):
    from pytest_npu.core.options import NpuOptions

    monkeypatch.setenv("TMPDIR", str(suite.path))
    assert str(NpuOptions().lock_file) == "/tmp/mlir-air-npu.lock"


SILICON = """
@pytest.mark.phase1
def test_one(npu_device, npu_lock):
    with npu_lock:
        pass
@pytest.mark.phase1
def test_two(npu_device): pass
"""


def test_run_that_waits_says_so_and_reports_the_waiting_time_apart(suite, monkeypatch, tmp_path):
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    lock = tmp_path / "npu.lock"
    suite.model(a=SILICON)
    holder = hold(lock)
    run = suite.start("--npu", "--no-npu-supervise", f"--npu-lock={lock}")
    lines = []
    for line in run.stdout:
        lines.append(line.rstrip())
        if "waiting for the lock" in line:
            holder.kill()
            holder.wait()
    assert run.wait() == 0
    hint = f"npu: waiting for the lock {lock} since 1 s, held by pid {holder.pid} ("
    assert any(line.startswith(hint) for line in lines), lines
    assert any(line.startswith("phase") and line.endswith("lock wait") for line in lines)
    test = suite.results()["tests"][0]
    assert 0.5 < test["lock_wait_s"] <= test["duration_s"]
    html = (suite.runs()[-1] / "report.html").read_text()
    assert "Waiting for the NPU" in html
    actions = [event["action"] for event in suite.events() if event["event"] == "lock"]
    assert actions == ["waiting", "acquired", "released"]


def test_time_out_is_an_error_of_the_test_that_names_the_holder(suite, monkeypatch, tmp_path):
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    lock = tmp_path / "npu.lock"
    suite.model(a=SILICON)
    process = hold(lock)
    try:
        result = suite.spawn("--npu", "--no-npu-supervise", f"--npu-lock={lock}", "--npu-lock-timeout=0.3")
    finally:
        process.kill()
        process.wait()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [f"*LockTimeout: the NPU lock {lock} was not free within 0.3 s; held by pid {process.pid}*"]
    )


def test_tests_that_need_no_device_run_without_the_lock(suite, monkeypatch, tmp_path):
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    lock = tmp_path / "npu.lock"
    suite.model(a="def test_compile(npu_device): pass")
    process = hold(lock)
    try:
        result = suite.spawn("--npu", "--no-npu-supervise", f"--npu-lock={lock}", "--npu-lock-timeout=0.1")
    finally:
        process.kill()
        process.wait()
    result.assert_outcomes(passed=1)


def test_lock_that_a_test_leaves_acquired_is_released(suite, monkeypatch, tmp_path):
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    lock = tmp_path / "npu.lock"
    suite.model(a="def test_x(npu_lock): npu_lock.acquire(); npu_lock.acquire(); assert 0")
    suite.run("--npu", "--no-npu-supervise", f"--npu-lock={lock}").assert_outcomes(failed=1)
    assert is_free(lock)
