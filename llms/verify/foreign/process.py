"""The process of a foreign adapter: asked by messages, limited in time, ended with everything it started.

A request is JSON, an answer an ``.npz`` in memory: plain values under ``json``, in which ``{"$array": n,
"bf16": bool}`` stands for array ``n``, the bits of bf16 or numbers. Nothing is unpickled.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llms.checkpoints import cache_root
from llms.verify.contract.deployment import DeploymentError
from llms.verify.contract.records import Array

WORKER = Path(__file__).with_name("worker.py")
#: Seconds that a process may take to end when it was asked to (closing contexts, exit handlers).
GRACE_S = 15.0
POLL_S = 0.05
LOG_TAIL = 4000
#: In the environment of the worker and so of everything it starts.
MARK = "NPU_ADOPTED_RUN"


class RemoteError(DeploymentError):
    """A foreign adapter failed or cannot be asked; the text says at which stage and why."""


@dataclass(frozen=True)
class WorkerExit:
    """How a worker ended.

    Attributes:
        how: ``exit code 0`` or ``signal SIGSEGV``.
        printed: the end of what it printed.
        threads: threads that it would have waited for.
        left: processes that it had started and left behind; they were killed.
        pyxrt: where its ``pyxrt`` came from, ``None`` when it imported none.
    """

    how: str
    printed: str
    left: int
    threads: tuple[str, ...] = ()
    pyxrt: str | None = None


class Worker:
    """A running worker. What it prints goes to a file: a pipe would stay open in what it leaves behind.

    Args:
        folder: the adapter's folder.
        pyxrt: module that is imported in place of ``pyxrt``; None for the real one.
        limit_s: longest time of one answer in seconds, 0 for no limit.
    """

    def __init__(self, folder: Path, *, pyxrt: str | None, limit_s: float) -> None:
        self.cwd = working_folder(folder)
        self._limit_s = limit_s
        self._mark = uuid.uuid4().hex
        self._work = tempfile.TemporaryDirectory(prefix="adopted-")
        self._log = Path(self._work.name) / "output.txt"
        self._connection, theirs = multiprocessing.Pipe()
        with self._log.open("wb") as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), str(theirs.fileno()), str(folder), pyxrt or ""],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.cwd,
                env={**os.environ, MARK: self._mark},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._exit: WorkerExit | None = None
        self._finalize = weakref.finalize(self, _kill, self._process, self._mark)

    def call(self, command: str, **values: Any) -> Any:
        """Ask and wait for the answer: plain values (lists as tuples) and arrays.

        Raises:
            RemoteError: the adapter raised (with stage and traceback), died, or took too long.
        """
        if self._exit is not None:
            raise RemoteError(f"the process of the adapter has ended already ({self._exit.how})")
        data = self._exchange(json.dumps({"command": command, **values}).encode())
        with np.load(io.BytesIO(data)) as stored:
            arrays = [stored[f"array{index}"] for index in range(len(stored.files) - 1)]
            answer = json.loads(bytes(stored["json"]))
        if "failed" in answer:
            failed, printed = answer["failed"], self._printed()
            before = f"\nprinted before:\n{printed}" if printed else ""
            raise RemoteError(
                f"{failed['stage']}: {failed['error']} (started in {self.cwd})\n{failed['traceback']}{before}"
            )
        return _filled(answer["values"], arrays)

    def _exchange(self, request: bytes) -> bytes:
        begin = time.monotonic()
        try:
            self._connection.send_bytes(request)
            while not self._connection.poll(POLL_S):
                if self._process.poll() is not None and not self._connection.poll():
                    raise EOFError
                if self._limit_s and time.monotonic() - begin > self._limit_s:
                    printed = self._end().printed
                    raise RemoteError(f"the adapter did not answer within {self._limit_s:.0f} s\n{printed}")
            return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            ended = self._end(GRACE_S)
            raise RemoteError(f"the process of the adapter died ({ended.how})\n{ended.printed}") from error

    def close(self) -> WorkerExit:
        """Let the adapter close what it has open, wait for the end, and kill what it left behind."""
        if self._exit is not None:
            return self._exit
        try:
            closed = self.call("close")
        except RemoteError:
            if self._exit is not None:  # it died or hung
                raise
            self._end()
            raise
        return self._end(GRACE_S, tuple(closed["threads"]), closed["pyxrt"])

    def _end(
        self, grace_s: float = 0.0, threads: tuple[str, ...] = (), pyxrt: str | None = None
    ) -> WorkerExit:
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        code = self._process.wait()
        self._finalize.detach()
        left = end_rest(self._mark)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._exit = WorkerExit(how, self._printed(), left, threads, pyxrt)
        self._connection.close()
        self._work.cleanup()
        return self._exit

    def _printed(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip()


def _filled(value: Any, arrays: list[Array]) -> Any:
    if isinstance(value, dict):
        if "$array" in value:
            array = arrays[value["$array"]]
            return array.view(ml_dtypes.bfloat16) if value["bf16"] else array
        return {key: _filled(one, arrays) for key, one in value.items()}
    return tuple(_filled(one, arrays) for one in value) if isinstance(value, list) else value


def working_folder(folder: Path) -> Path:
    """The build folder of the example's Makefile when it is there, else one of ours in the cache."""
    built = folder / ("build_peano" if os.environ.get("PEANO_INSTALL_DIR") else "build_chess")
    if built.is_dir():
        return built
    own = cache_root() / "adopted" / folder.name
    own.mkdir(parents=True, exist_ok=True)
    return own


def _kill(process: subprocess.Popen[bytes], mark: str) -> None:
    """For a worker that nobody closed, at the latest when the interpreter ends."""
    process.kill()
    process.wait()
    end_rest(mark)


def end_rest(mark: str) -> int:
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
            carries = wanted in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if carries:
            yield int(folder.name)
