"""Kill processes of a `pytest --npu` that waits for the device, and see whether the lock is free after it.

Usage: kill_a_run.py all|parent|child. Prints one JSON object: held (before), free (after), seconds, left (how
many processes of the run are still there a moment later).
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LOCK = Path("/tmp/mlir-air-npu.lock")
TEST = str(Path(__file__).with_name("sum_model") / "tests" / "check_sum.py")
WAITING = {"FX_DELAY_MS": "-1", "NPU_WAIT_LIMIT_MS": "100000"}


def free() -> bool:
    """Whether somebody else could take the lock now."""
    try:
        with LOCK.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def until(done: bool, limit_s: float) -> float:
    """Wait until the lock is free (`done`) or held; seconds it took."""
    begin = time.monotonic()
    while free() is not done and time.monotonic() - begin < limit_s:
        time.sleep(0.05)
    return time.monotonic() - begin


def processes() -> list[int]:
    """The run's own processes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if TEST in command and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def main(which: str) -> None:
    """Run, kill, look."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_npu.plugin",
        "--npu",
    ]
    run = subprocess.Popen(
        [*command, "--npu-report-dir", "/tmp/reports", TEST],
        env={**os.environ, **WAITING},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(False, 60)
    held = not free()
    targets = {"all": processes(), "parent": [run.pid], "child": [p for p in processes() if p != run.pid]}
    for pid in targets[which]:
        os.kill(pid, signal.SIGKILL)
    seconds = until(True, 30)
    answer = {"held": held, "free": free(), "seconds": round(seconds, 2)}
    if which == "child":  # the parent starts a new one, which is not what is looked at here
        run.send_signal(signal.SIGINT)
        try:
            run.wait(20)
        except subprocess.TimeoutExpired:
            for pid in processes():
                os.kill(pid, signal.SIGKILL)
    run.wait()
    time.sleep(0.5)
    print(json.dumps({**answer, "left": len(processes())}))


if __name__ == "__main__":
    main(sys.argv[1])
