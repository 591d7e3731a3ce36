"""The process of an adopted adapter: started, limited in time, and ended with everything it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")
#: Seconds that a process may take to end when its answer is there (closing contexts, exit handlers).
GRACE_S = 15.0
POLL_S = 0.05
LOG_TAIL = 4000
#: In the environment of the worker and so of everything it starts.
MARK = "NPU_ADOPTED_RUN"


class AdoptedError(Exception):
    """The adapter could not be judged; the text says at which stage and why."""


@dataclass(frozen=True)
class Ended:
    """How the process ended, the end of what it printed, and how many processes it had left behind."""

    how: str
    printed: str
    left: int


def run_worker(request: Path, answer: Path, cwd: Path, limit_s: float) -> Ended:
    """Run the worker on a request; `limit_s` 0 is no limit.

    What it prints goes to a file: a pipe would stay open in whatever it leaves behind. A process that has
    answered and does not end is ended. Raises AdoptedError when there is no answer within the limit.
    """
    log = request.with_name("output.txt")
    mark = uuid.uuid4().hex
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(request)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**os.environ, MARK: mark},
            start_new_session=True,
        )
    try:
        in_time = _wait(process, answer, limit_s)
    finally:
        if process.poll() is None:
            process.kill()
        code = process.wait()
        left = _end_rest(mark)
    printed = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip()
    if not in_time:
        raise AdoptedError(f"the adapter did not answer within {limit_s:.0f} s\n{printed}")
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Ended(how, printed, left)


def _wait(process: subprocess.Popen[bytes], answer: Path, limit_s: float) -> bool:
    """Wait until the process has ended, or has answered and had time to end; False past the limit."""
    begin = time.monotonic()
    answered: float | None = None
    while process.poll() is None:
        now = time.monotonic()
        if answered is None and answer.is_file():
            answered = now
        if answered is not None and now - answered > GRACE_S:
            return True
        if answered is None and limit_s and now - begin > limit_s:
            return False
        time.sleep(POLL_S)
    return True


def _end_rest(mark: str) -> int:
    """Kill what carries the mark in its environment, also when it has left the process group."""
    count = 0
    for pid in _marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
            count += 1
        except ProcessLookupError:
            continue
    return count


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found = wanted in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if found:
            yield int(folder.name)
