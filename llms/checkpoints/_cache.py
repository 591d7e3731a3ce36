"""The cache folder: where it is, remembered file hashes, and a lock that a killed process releases."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CACHE_ENV = "PYTEST_NPU_CACHE"
_CHUNK = 1 << 20


def cache_root() -> Path:
    """Return ``$PYTEST_NPU_CACHE``, ``$XDG_CACHE_HOME/pytest-npu`` or ``~/.cache/pytest-npu``."""
    override = os.environ.get(CACHE_ENV)
    if override:
        return Path(override).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    parent = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return parent / "pytest-npu"


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` so that a reader sees the old file or the whole new one, whatever kills the writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content (hex).

    The digest is remembered in the cache folder with size, inode, mtime and ctime (ns) of the file, so that a
    270 MB checkpoint is hashed once and not per run. An unwritable cache only costs time.
    """
    status = path.stat()
    stamp = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    memo = cache_root() / "hashes" / f"{name}.json"
    try:
        known = json.loads(memo.read_text(encoding="utf-8"))
        if known["stamp"] == stamp and len(known["sha256"]) == 64:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    result = digest.hexdigest()
    with suppress(OSError):
        write_atomically(memo, json.dumps({"stamp": stamp, "sha256": result}).encode())
    return result


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive ``flock`` on ``path``; the kernel releases it when the process dies.

    Args:
        path: lock file, created when missing and never deleted (deleting would make two holders possible).
        on_wait: called once when somebody else holds the lock, before waiting for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
