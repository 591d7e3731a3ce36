"""Who holds a lock file: read from /proc, with the note in the file as a second source.

Everything here is a hint for people, except `held_by_ancestor`: a lock that one of our own ancestors holds
counts as ours, since that ancestor waits for us (``flock FILE make verify``).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_MAX_NOTE = 4096


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock. `since` is a local time, empty when unknown."""

    pid: int
    command: str
    host: str
    since: str
    certain: bool = True

    def __str__(self) -> str:
        text = f"pid {self.pid} ({self.command or 'command unknown'}) on {self.host}"
        if self.since:
            text += f" since {self.since}"
        return text if self.certain else f"probably {text} (from the note in the lock file)"


def note_text() -> str:
    """The line a holder writes into a lock file it may write: who, where, since when."""
    holder = Holder(
        os.getpid(), command_of(os.getpid()), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S")
    )
    return json.dumps(asdict(holder)) + "\n"


def command_of(pid: int) -> str:
    """Command line of a process, cut to 120 characters; empty when it cannot be read."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    text = raw.replace(b"\0", b" ").decode(errors="replace").strip()
    return text if len(text) <= 120 else text[:117] + "..."


def _started(pid: int) -> str:
    try:
        ticks = int(_stat_fields(pid)[19])
        boot = next(
            int(line.split()[1])
            for line in (_PROC / "stat").read_text().splitlines()
            if line.startswith("btime")
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return ""
    seconds = boot + ticks / os.sysconf("SC_CLK_TCK")
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + " (process start)"


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the command name, which may hold spaces and brackets."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def ancestors(pid: int | None = None) -> Iterator[int]:
    """Process ids of our parent, its parent, and so on, as far as /proc shows them."""
    current = os.getpid() if pid is None else pid
    for _ in range(1000):
        try:
            current = int(_stat_fields(current)[1])
        except (OSError, ValueError, IndexError):
            return
        if current <= 0:
            return
        yield current


def _is_exclusive_flock(line: str, key: tuple[int, int]) -> int | None:
    """Pid of a line of /proc/locks or fdinfo that is an exclusive flock on the inode `key`, else None."""
    words = line.split()
    if "FLOCK" not in words or "->" in words:
        return None
    at = words.index("FLOCK")
    try:
        mode, pid, where = words[at + 2], int(words[at + 3]), words[at + 4]
        major, minor, inode = where.split(":")
        device = os.makedev(int(major, 16), int(minor, 16))
    except (IndexError, ValueError):
        return None
    return pid if mode == "WRITE" and (device, int(inode)) == key else None


def _locks_pid(key: tuple[int, int]) -> int | None:
    try:
        lines = (_PROC / "locks").read_text().splitlines()
    except OSError:
        return None
    return next((pid for line in lines if (pid := _is_exclusive_flock(line, key)) is not None), None)


def find_holder(path: Path, key: tuple[int, int]) -> Holder | None:
    """The process that holds an exclusive flock on `path`, whose (device, inode) is `key`.

    /proc/locks names the process that took the lock; it does not show processes of other containers, so
    the note in the file is used when /proc has nothing.
    """
    pid = _locks_pid(key)
    note = _read_note(path)
    host = socket.gethostname()
    if pid is not None and pid > 0:
        if note is not None and note.pid == pid and note.host == host:
            return note
        return Holder(pid, command_of(pid) or "has ended, a child keeps its descriptor", host, _started(pid))
    if note is not None:
        return Holder(note.pid, note.command, note.host, note.since, certain=False)
    return None


def _read_note(path: Path) -> Holder | None:
    try:
        with path.open("rb") as file:
            value: Any = json.loads(file.read(_MAX_NOTE))
        return Holder(int(value["pid"]), str(value["command"]), str(value["host"]), str(value["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def held_by_ancestor(key: tuple[int, int], ignore_fds: frozenset[int]) -> int | None:
    """Pid of this process or an ancestor that holds an exclusive flock on the inode `key`, else None.

    Looks at the descriptors of each of them (``/proc/PID/fdinfo`` lists the locks of a descriptor) and at the
    process that /proc/locks names, because a shell may have closed the descriptor in between.
    `ignore_fds`: descriptors of this process that are candidates themselves.
    """
    me = os.getpid()
    line_of_descent = [me, *ancestors()]
    taker = _locks_pid(key)
    if taker is not None and taker != me and taker in line_of_descent:
        return taker
    for pid in line_of_descent:
        try:
            infos = list((_PROC / str(pid) / "fdinfo").iterdir())
        except OSError:
            continue
        for info in infos:
            if pid == me and int(info.name) in ignore_fds:
                continue
            try:
                lines = info.read_text().splitlines()
            except OSError:
                continue
            if any(line.startswith("lock:") and _is_exclusive_flock(line, key) is not None for line in lines):
                return pid
    return None
