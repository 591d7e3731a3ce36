"""Timeline of a run as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

    >>> with Timeline("trace.json"):                                                    # doctest: +SKIP
    ...     run_npu_prefill(...)

Everything that goes through the toolkit while a timeline is open is in it: runs of ELFs, buffer writes and
reads, host operations, waits, the sections prefill and decode with each forward pass; launches inside an
ELF where the device reports them. All times are those of the device clock, modelled on the twin and measured
on silicon; every clock is a process of the trace, named after its label. Off, it costs one test of an empty
tuple per call.

The events go to `FILE.<pid>.part` as they come, which is a complete JSON document after every write; closing
the timeline renames it to `FILE`. What a process that died left behind is kept as `*.unfinished-N.json`.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .driver import Driver, LaunchEvent, current
from .exceptions import ToolkitError

HOST = "host"
DEVICE = "NPU"
SECTIONS = "sections"
TESTS = "tests"
_ORDER = (TESTS, SECTIONS, HOST, DEVICE)

_TRAILER = b"\n]}\n"
_FLUSH_EVENTS = 512
_FLUSH_S = 1.0

recorders: tuple[Timeline, ...] = ()
"""Open timelines, replaced as a whole; empty in normal operation."""


class TimelineError(ToolkitError):
    """A timeline could not be written; the message names file and cause."""


class _TraceFile:
    """A JSON document that grows and is complete after every write."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        text = json.dumps(head)[:-1] + ', "traceEvents": ['
        self._end = 0
        self._put(text.encode())
        self._separator = b"\n"

    def _put(self, data: bytes) -> None:
        view = memoryview(data + _TRAILER)
        at = self._end
        while view:
            written = os.pwrite(self._file, view, at)
            view, at = view[written:], at + written
        self._end += len(data)

    def add(self, lines: list[str]) -> None:
        """Append events. Raises OSError."""
        self._put(self._separator + ",\n".join(lines).encode())
        self._separator = b",\n"

    def close(self) -> None:
        """Close the file; it stays where it is."""
        os.close(self._file)


class Timeline:
    """Records what the toolkit does and writes it to a file. A context manager; timelines may be nested.

    `device`: a driver, by default that of the process. Leaving the block,
    with or without an exception, puts the file into place; so does the end of the interpreter.

    Raises TimelineError when the file cannot be written: on entering, or on leaving when it happened later,
    unless another exception is on its way.
    """

    def __init__(self, path: str | os.PathLike[str], *, device: Driver | None = None) -> None:
        self.path = Path(path).absolute()
        self.events = 0
        self.error = ""
        self.recovered: tuple[Path, ...] = ()
        self._device = device
        self._file: _TraceFile | None = None
        self._pending: list[str] = []
        self._launches: list[LaunchEvent] = []
        self._flushed = 0.0
        self._clocks: dict[int, tuple[int, Any, float]] = {}
        self._tracks: dict[tuple[int, str, int], int] = {}
        self._lock = threading.RLock()
        self._watch = contextlib.ExitStack()

    def __enter__(self) -> Timeline:
        """Open the file and begin to record."""
        global recorders
        device = self._device = self._device or current()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.recovered = keep_unfinished(self.path)
            part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
            head = {"displayTimeUnit": "ms", "otherData": {"device": device.label, "time": "device clock"}}
            self._file = _TraceFile(part, head)
        except OSError as error:
            raise TimelineError(f"timeline {self.path} cannot be written: {error}") from error
        self._open_clock(device.clock, device.label, float(device.clock.now()))
        self._flushed = time.monotonic()
        watch = getattr(device.clock, "watch_launches", None)
        if watch is not None:
            self._watch.enter_context(watch(self._launches.append))
        atexit.register(self.close)
        recorders = (*recorders, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the file into place."""
        self.close()
        if self.error and kind is None:
            raise TimelineError(f"timeline {self.path} is incomplete: {self.error}")

    def close(self) -> None:
        """Stop recording and put the file into place; `error` says what went wrong. May be called again."""
        global recorders
        if self._file is None:
            return
        recorders = tuple(other for other in recorders if other is not self)
        self._watch.close()
        atexit.unregister(self.close)
        with self._lock:
            self._add_launches(float("-inf"), float("inf"))
            self.flush()
            file, self._file = self._file, None
            try:
                file.close()
                file.path.replace(self.path)
            except OSError as error:
                self.error = self.error or str(error)

    # -- recording ---------------------------------------------------------------------------------------

    def slice(
        self, clock: Any, track: str, kind: str, name: str, begin_s: float, end_s: float, **arguments: Any
    ) -> None:
        """Add one event. Times in seconds on `clock`; slices of one track must nest."""
        with self._lock:
            if self._file is None:
                return
            process = self._open_clock(clock, str(getattr(clock, "label", "unnamed clock")), begin_s)
            if kind == "elf":
                self._add_launches(begin_s, end_s)
            self._add(process, track, kind, name, begin_s, end_s, arguments)
            if len(self._pending) >= _FLUSH_EVENTS or time.monotonic() - self._flushed > _FLUSH_S:
                self.flush()

    def flush(self) -> None:
        """Write what has been collected; the file on disk is complete after it."""
        with self._lock:
            lines, self._pending = self._pending, []
            self._flushed = time.monotonic()
            if not lines or self._file is None or self.error:
                return
            try:
                self._file.add(lines)
            except OSError as error:  # a full disk must not end the run
                self.error = str(error)

    def _add_launches(self, begin_s: float, end_s: float) -> None:
        """Launches that the device reported, cut to the run around them."""
        launches, self._launches[:] = list(self._launches), []
        if not launches or self._device is None:
            return
        process = self._open_clock(self._device.clock, self._device.label, launches[0].start_s)
        for launch in launches:
            first, last = launch.start_s, launch.start_s + launch.duration_s
            if first >= begin_s:
                last = min(last, end_s)
            arguments = {"elf": launch.program, "op": launch.op}
            self._add(process, DEVICE, "kernel", launch.launch, first, last, arguments)

    def _add(
        self,
        process: tuple[int, Any, float],
        track: str,
        kind: str,
        name: str,
        begin_s: float,
        end_s: float,
        arguments: Mapping[str, Any],
    ) -> None:
        pid, _, zero = process
        # whole nanoseconds before the subtraction: rounding cannot move an inner slice out of its outer one
        first, last = max(0, round((begin_s - zero) * 1e9)), max(0, round((end_s - zero) * 1e9))
        event: dict[str, Any] = {
            "name": name,
            "cat": kind,
            "ph": "X",
            "ts": first / 1e3,
            "dur": max(0, last - first) / 1e3,
            "pid": pid,
            "tid": self._track(pid, track),
        }
        if arguments:
            event["args"] = dict(arguments)
        self._pending.append(json.dumps(event))
        self.events += 1

    def _open_clock(self, clock: Any, label: str, zero: float) -> tuple[int, Any, float]:
        """The process of the trace that a clock is; its time begins where it is first seen."""
        known = self._clocks.get(id(clock))
        if known is None:
            known = self._clocks[id(clock)] = (len(self._clocks) + 1, clock, zero)
            self._name(known[0], 0, "process_name", name=label)
            self._name(known[0], 0, "process_labels", labels=label)
        return known

    def _track(self, pid: int, track: str) -> int:
        """Number of a track; every thread of the host has one of its own."""
        thread = threading.get_ident() if track == HOST else 0
        known = self._tracks.get((pid, track, thread))
        if known is None:
            same = sum(1 for p, t, _ in self._tracks if (p, t) == (pid, track))
            known = self._tracks[pid, track, thread] = len(self._tracks) + 1
            self._name(pid, known, "thread_name", name=track if not same else f"{track} {same + 1}")
            self._name(pid, known, "thread_sort_index", sort_index=_ORDER.index(track))
        return known

    def _name(self, pid: int, tid: int, what: str, **arguments: Any) -> None:
        event = {"name": what, "ph": "M", "ts": 0, "dur": 0, "pid": pid, "tid": tid, "args": arguments}
        self._pending.append(json.dumps(event))


def record(clock: Any, track: str, kind: str, name: str, begin_s: float, **arguments: Any) -> None:
    """Add an event that ends now to every open timeline."""
    end_s = clock.now()
    for recorder in recorders:
        recorder.slice(clock, track, kind, name, begin_s, end_s, **arguments)


@contextlib.contextmanager
def span(clock: Any, track: str, kind: str, name: str, **arguments: Any) -> Iterator[None]:
    """Put the block on every timeline that is open at its end."""
    begin = clock.now()
    try:
        yield
    finally:
        if recorders:
            record(clock, track, kind, name, begin, **arguments)


def flush() -> None:
    """Bring every open timeline to disk, before something that may not come back."""
    for recorder in recorders:
        recorder.flush()


def keep_unfinished(path: Path) -> tuple[Path, ...]:
    """Rename what dead processes left of `path`, or of files of its workers; returns the new names."""
    kept = []
    for part in sorted(path.parent.glob(f"{glob.escape(path.stem)}*{glob.escape(path.suffix)}.*.part")):
        name, pid = part.name.removesuffix(".part").rsplit(".", 1)
        if not pid.isdigit() or Path("/proc", pid).exists():
            continue
        base = Path(name)
        number = 1
        while (target := part.with_name(f"{base.stem}.unfinished-{number}{base.suffix}")).exists():
            number += 1
        with contextlib.suppress(FileNotFoundError):
            part.replace(target)
            kept.append(target)
    return tuple(kept)
