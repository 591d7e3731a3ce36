"""The event log: one JSON object per line, written and flushed as things happen.

Reports are made from this file and nothing else, so whatever ends a run (a hang, a kill, Ctrl-C) leaves a
log that can still be rendered: ``python -m pytest_npu.report RUN_DIR``.

Every line has ``v`` (schema version), ``seq`` (from 0 per log), ``t`` (seconds since the epoch), ``event``,
``model`` and what the event adds:

==================  =================================================================================
event               fields
==================  =================================================================================
session_start       run_id, argv, rootdir, host, pid, python, platform, cpu, versions, options; command
                    where something else than pytest made the run
preflight           facts (list of {name, value, ok, remedy})
device              name, label, details
deployment          checkpoint ({label, kind, path, content_hash}), config, folder
collected           tests (list of {nodeid, phase, perf}), replaces an earlier one of the same worker
deselected          nodeids, reason
collect_error       nodeid, longrepr
worker              worker, host, pid
test_start          nodeid, phase, worker, hang_limit_s
test_phase          nodeid, when (setup|call|teardown), outcome (passed|failed|skipped|rerun), duration_s,
                    longrepr, sections, wasxfail, blocked_by, lock_wait_s, device_s, worker
test_finish         nodeid, worker
record              nodeid, kind, payload
lock                nodeid, action (waiting|acquired|released|timeout), path, waited_s, held_s, holder
retry               nodeid, cause, attempt
regression          nodeid, phase, reason
crash               nodeid, cause, detail, worker, stacks
poisoned            cause
timeline            path, events, error, unfinished, worker
interrupt           reason, nodeid
session_finish      exit_status
==================  =================================================================================
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from pytest_npu.core.constants import EVENT_SCHEMA
from pytest_npu.core.exceptions import EventLogError, RecordError

Event = dict[str, Any]

#: Longest text (tracebacks, captured output) that one field of an event carries, in characters.
MAX_TEXT = 60_000


class Sink(Protocol):
    """Where events go: files of this process, an xdist channel, or the pipe of a supervisor."""

    def emit(self, event: Event) -> None:
        """Take one event. Never raises for a full disk or a vanished reader."""
        ...


def make_event(event: str, *, model: str | None = None, **fields: Any) -> Event:
    """Build an event of now. `model` None means: concerns every model of the run."""
    return {"event": event, "t": time.time(), "model": model, **fields}


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """Cut the middle out of a text that is too long for the log, and say so."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"


def to_jsonable(value: Any, path: str = "payload") -> Any:
    """Turn a payload into plain JSON values.

    numpy scalars and arrays become numbers and lists, tuples become lists, non-finite numbers become the
    strings ``nan``, ``inf`` and ``-inf`` (JSON has none, and they must stay visible).

    Raises RecordError naming the entry that cannot be carried.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int)):
                raise RecordError(f"{path} has the key {key!r}; keys must be text or whole numbers")
        return {str(k): to_jsonable(v, f"{path}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(v, f"{path}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy arrays and scalars, ml_dtypes included
        plain = value.tolist()
        if type(plain) is not type(value):
            return to_jsonable(plain if not hasattr(plain, "tolist") else float(plain), path)
    raise RecordError(
        f"{path} is a {type(value).__name__}, which JSON cannot carry; convert it to plain values"
    )


class EventLog:
    """Appends events to one file. Thread-safe; each event is one `write` call, so it is there or not.

    After an `OSError` (disk full, folder gone) the log keeps the events in memory and remembers the error;
    the tests go on, and reports can still be rendered by this process.
    """

    def __init__(self, path: Path, error: OSError | None = None) -> None:
        """Open the file; with an `error` that happened already nothing is opened, everything is in memory."""
        self.path = path
        self.error = error
        self._lost: list[Event] = []
        self._seq = 0
        self._lock = threading.Lock()
        self._fd = -1
        if error is None:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, event: Event) -> None:
        """Write one event."""
        with self._lock:
            line = {"v": EVENT_SCHEMA, "seq": self._seq, **event}
            self._seq += 1
            data = (json.dumps(line, allow_nan=False, default=str) + "\n").encode()
            if self.error is None:
                try:
                    written = os.write(self._fd, data)
                    if written != len(data):
                        raise OSError(28, "short write", str(self.path))
                    return
                except OSError as error:
                    self.error = error
            self._lost.append(line)

    def events(self) -> list[Event]:
        """Everything logged so far, including what did not reach the disk."""
        if self._fd < 0 and self.error is not None:
            return list(self._lost)
        seen = {event["seq"] for event in self._lost}
        on_disk = [event for event in read_events(self.path) if event["seq"] not in seen]
        return on_disk + self._lost

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def read_events(path: Path) -> Iterator[Event]:
    """Read an event log. A torn last line (the process was killed while writing) is left out.

    Raises EventLogError for a file that is missing, not an event log, or of a newer schema.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise EventLogError(f"cannot read the event log {path}: {error.strerror}") from error
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            version = event["v"]
        except (ValueError, KeyError, TypeError) as error:
            if number >= len(lines) - 1:
                return
            raise EventLogError(f"{path}, line {number} is no event: {line[:60]!r}") from error
        if version > EVENT_SCHEMA:
            raise EventLogError(
                f"{path} has schema version {version}, this release reads up to {EVENT_SCHEMA}; "
                "update pytest-npu"
            )
        yield event


def atomic_write(path: Path, data: str) -> None:
    """Write a text file so that a reader sees the old or the new content, never a part."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        # ids of tests may hold half of a surrogate pair, which UTF-8 cannot carry
        temp.write_text(data, encoding="utf-8", errors="backslashreplace")
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
