"""The NPU lock: one process on the device at a time, across users, tools and shells.

A BSD flock on a machine-wide file, the same one that ``flock(1)`` takes, so shell scripts and this plugin
exclude each other. The file is never deleted: unlinking a lock file lets two processes hold "the" lock.

What makes it more than one call:

* The file may belong to somebody else. It is opened without `O_CREAT` first, because the kernel refuses that
  flag for foreign files in sticky folders (sysctl fs.protected_regular), and read-only if writing is not
  allowed: flock needs no write access.
* A lock that an ancestor holds counts as held (see `lock_holder`). Siblings below that ancestor, xdist
  workers for example, still exclude each other by a second file of their own.
* Descriptors are close-on-exec, and closed in forked children; otherwise a forked child would keep the lock
  of a killed parent.
* Within one process the lock is re-entrant and counted, however many `NpuLock` objects there are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pytest_npu.core.constants import DEFAULT_LOCK_FILE, DEFAULT_LOCK_TIMEOUT_S
from pytest_npu.core.exceptions import LockTimeout
from pytest_npu.device.lock_holder import find_holder, held_by_ancestor, note_text

#: Told about `waiting`, `acquired`, `released` and `timeout`, with the fields of the `lock` event.
LockListener = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class LockConfig:
    """Settings of the NPU lock; times in seconds.

    ``LockConfig(Path("/tmp/other.lock"), timeout=5)`` waits at most five seconds. `poll` is the pause
    between two attempts, `hint_after` when a waiting process first says whom it waits for, and `hint_every`
    how often then.
    """

    path: Path = Path(DEFAULT_LOCK_FILE)
    timeout: float = DEFAULT_LOCK_TIMEOUT_S
    poll: float = 0.05
    hint_after: float = 1.0
    hint_every: float = 60.0


@dataclass
class _Held:
    """One lock of this process: the descriptors to close at the end, and how often it was taken."""

    fds: list[int]
    count: int
    since: float
    ancestor: int | None


_registry: dict[tuple[int, int], _Held] = {}
_open_fds: set[int] = set()
_guard = threading.Lock()


def _drop_in_child() -> None:
    """In a forked child: close our copies of the descriptors (closing does not unlock the parent's)."""
    global _guard
    _guard = threading.Lock()
    for fd in _open_fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    _open_fds.clear()
    _registry.clear()


os.register_at_fork(after_in_child=_drop_in_child)


def _open(path: Path) -> int:
    """Open a lock file, creating it when it is missing. Raises OSError naming the file."""
    flags = os.O_CLOEXEC | os.O_NOCTTY
    for _ in range(100):
        for mode in (os.O_RDWR, os.O_RDONLY):
            try:
                return _track(os.open(path, mode | flags))
            except OSError as error:
                if error.errno == errno.ENOENT:
                    break
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or mode == os.O_RDONLY:
                    raise
        try:
            fd = _track(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666))
        except FileExistsError:
            continue  # somebody else created it in between: open theirs
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o666)  # our own new file: other users must be able to open it whatever our umask
        return fd
    raise FileNotFoundError(errno.ENOENT, "the lock file appears and disappears all the time", str(path))


def _track(fd: int) -> int:
    _open_fds.add(fd)
    return fd


def _close(fd: int) -> None:
    _open_fds.discard(fd)
    os.close(fd)


def _key(file: int | Path) -> tuple[int, int]:
    """Device and inode of an open file, or of the file that a path names now. Raises OSError."""
    status = os.stat(file)  # noqa: PTH116  (descriptors, too)
    return status.st_dev, status.st_ino


def _sibling_path(key: tuple[int, int]) -> Path:
    """The file by which processes below one lock-holding ancestor exclude each other."""
    return Path("/tmp") / f"pytest-npu-siblings-{os.getuid()}-{key[0]:x}-{key[1]:x}.lock"


def _is_current(path: Path, fd: int) -> bool:
    """False when somebody deleted or replaced the file after we opened it."""
    try:
        return _key(path) == _key(fd)
    except OSError:
        return False


def _try_flock(path: Path) -> tuple[list[int], int | None, tuple[int, int]]:
    """One attempt. Returns (descriptors, ancestor pid, key); no descriptors: somebody else has it.

    With an ancestor as holder the attempt goes on with the siblings' file, whose holder may be an
    ancestor too, and so on.
    """
    first_key: tuple[int, int] | None = None
    first_ancestor: int | None = None
    for _ in range(16):
        fd = _open(path)
        key = _key(fd)
        first_key = first_key or key
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _close(fd)
            ancestor = held_by_ancestor(key, frozenset(_open_fds))
            if ancestor is None:
                return [], None, first_key
            first_ancestor = first_ancestor or ancestor
            path = _sibling_path(key)
            continue
        except BaseException:
            _close(fd)
            raise
        if _is_current(path, fd):
            return [fd], first_ancestor, first_key
        _close(fd)
        if first_ancestor is None:
            first_key = None
    return [], None, first_key or (0, 0)


def _write_note(fd: int, text: str) -> None:
    """Put a note into the file, or empty it. Not possible with a read-only descriptor: no harm."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)
    except OSError:
        pass


class NpuLock:
    """Context manager that holds the NPU lock.

    ``with NpuLock(LockConfig(timeout=60)) as lock: ...`` raises LockTimeout naming the holder after 60 s.
    `waited_s` sums up the waiting time of this object; it is not part of any device or test time.
    """

    def __init__(self, config: LockConfig | None = None, listener: LockListener | None = None) -> None:
        self.config = config or LockConfig()
        self.waited_s = 0.0
        self._listener = listener
        self._keys: list[tuple[int, int]] = []

    @property
    def path(self) -> Path:
        """The lock file."""
        return self.config.path

    @property
    def held(self) -> bool:
        """True between acquire and release of this object."""
        return bool(self._keys)

    def acquire(self) -> None:
        """Take the lock, waiting up to the limit.

        Raises LockTimeout (names the holder) or OSError (the file can neither be opened nor created).
        """
        start = time.monotonic()
        next_hint = start + self.config.hint_after
        while True:
            with _guard:
                if self._attempt(start):
                    return
            now = time.monotonic()
            if now - start >= self.config.timeout:
                self.waited_s += now - start
                holder = self._holder_text()
                self._tell("timeout", waited_s=now - start, holder=holder)
                raise LockTimeout(self.path, now - start, holder)
            if now >= next_hint:
                self._tell("waiting", waited_s=now - start, holder=self._holder_text())
                next_hint = now + self.config.hint_every
            time.sleep(min(self.config.poll, max(0.0, start + self.config.timeout - now)))

    def _attempt(self, start: float) -> bool:
        """One attempt under the guard; True when the lock is ours now."""
        try:
            held = _registry.get(key := _key(self.path))
        except OSError:
            held = None
        if held is not None:
            held.count += 1
            self._keys.append(key)
            return True
        fds, ancestor, key = _try_flock(self.path)
        if not fds:
            return False
        now = time.monotonic()
        _registry[key] = _Held(fds, 1, now, ancestor)
        self._keys.append(key)
        if ancestor is None:
            _write_note(fds[0], note_text())
        self.waited_s += now - start
        holder = f"pid {ancestor}, an ancestor of this process" if ancestor is not None else ""
        self._tell("acquired", waited_s=now - start, holder=holder)
        return True

    def release(self) -> None:
        """Give the lock back. Raises RuntimeError when this object does not hold it."""
        with _guard:
            if not self._keys:
                raise RuntimeError(f"the NPU lock {self.path} is released but was not acquired")
            key = self._keys.pop()
            held = _registry.get(key)
            if held is None:  # a forked child: the lock is the parent's
                return
            held.count -= 1
            if held.count:
                return
            del _registry[key]
            if held.ancestor is None:
                _write_note(held.fds[0], "")
            for fd in held.fds:
                _close(fd)
        self._tell("released", held_s=time.monotonic() - held.since)

    def _holder_text(self) -> str:
        try:
            holder = find_holder(self.path, _key(self.path))
        except OSError:
            holder = None
        return str(holder) if holder is not None else "a process that this system does not show"

    def _tell(self, action: str, **fields: Any) -> None:
        if self._listener is not None:
            self._listener(action, {"path": str(self.path), **fields})

    def __enter__(self) -> NpuLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class NoLock(NpuLock):
    """The lock of the twin: every process has a device of its own, so there is nothing to wait for."""

    def acquire(self) -> None:
        """Count only."""
        self._keys.append((0, 0))

    def release(self) -> None:
        """Count only. Raises RuntimeError when this object does not hold it."""
        if not self._keys:
            raise RuntimeError("the NPU lock is released but was not acquired")
        self._keys.pop()
