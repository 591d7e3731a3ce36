"""The twin's virtual clock.

Latencies on the twin are modelled, not measured: runs, buffer syncs and declared host operations advance this
clock, and nothing else does. One clock per process is enough because one process models one machine with one
NPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class VirtualClock:
    """A monotonic clock that only moves when told to. Starts at 0.

    Usage: ``clock.now()`` is in seconds, like :func:`time.perf_counter`, so it serves as a benchmark timer;
    ``clock.advance_us(12.5)`` moves it. Safe to share between threads.
    """

    __slots__ = ("_lock", "_now_us")

    def __init__(self) -> None:
        self._now_us = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Modelled time since the start of the process in seconds."""
        return self._now_us * 1e-6

    def now_us(self) -> float:
        """Modelled time since the start of the process in microseconds."""
        return self._now_us

    def advance_us(self, us: float) -> float:
        """Move the clock by ``us`` microseconds and return the new time in microseconds.

        Raises ValueError for a negative or non-finite step: a clock that runs backwards hides errors.
        """
        if not 0.0 <= us < float("inf"):
            raise ValueError(f"the virtual clock cannot advance by {us!r} us")
        with self._lock:
            self._now_us += us
            return self._now_us

    def advance_to_us(self, us: float) -> float:
        """Move the clock to ``us`` microseconds unless it is already past it; return the time after that."""
        with self._lock:
            if us > self._now_us:
                self._now_us = us
            return self._now_us

    def __repr__(self) -> str:
        return f"<VirtualClock at {self._now_us / 1e3:.3f} ms (modelled)>"


_default = VirtualClock()
_timing_only_depth = 0


def default_clock() -> VirtualClock:
    """The clock of this process's device: every run, sync and declared host operation advances it."""
    return _default


def is_timing_only() -> bool:
    """True inside :func:`timing_only`."""
    return _timing_only_depth > 0


@contextlib.contextmanager
def timing_only() -> Iterator[VirtualClock]:
    """Walk programs without computing: runs advance the clock and leave their outputs poisoned.

    With it TTFT and TPS of a model at any length are predicted in seconds and without weights. Buffer
    contents are not copied either. The mode belongs to the process, not to a thread, and nests.
    """
    global _timing_only_depth
    _timing_only_depth += 1
    try:
        yield _default
    finally:
        _timing_only_depth -= 1
