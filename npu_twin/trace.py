"""Observation of the modelled device: which launch ran when, on the virtual clock.

Off by default and free when off. Usage::

    with trace.observe() as events:
        run.start()
        run.wait(1000)
    for event in events:
        print(event.launch, event.duration_s)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple


class TraceEvent(NamedTuple):
    """One thing that the device did.

    ``kind`` is ``run`` (a whole program, with its start-up), ``launch`` (one kernel of it) or ``sync`` (a
    buffer). ``program`` and ``launch`` are names from the listing, ``op`` is the operation of a launch and
    the direction of a sync; fields that do not apply are empty. Times are seconds on the virtual clock.
    """

    kind: Literal["run", "launch", "sync"]
    program: str
    launch: str
    op: str
    start_s: float
    duration_s: float


Sink = Callable[[TraceEvent], None]

sinks: tuple[Sink, ...] = ()
"""Current observers, replaced as a whole by :func:`subscribe`; empty in normal operation."""


@contextlib.contextmanager
def subscribe(sink: Sink) -> Iterator[None]:
    """Call ``sink`` with every event of this process until the block ends. Observers nest."""
    global sinks
    sinks = (*sinks, sink)
    try:
        yield
    finally:
        rest = list(sinks)
        rest.remove(sink)
        sinks = tuple(rest)


@contextlib.contextmanager
def observe() -> Iterator[list[TraceEvent]]:
    """Collect the events of the block in a list."""
    events: list[TraceEvent] = []
    with subscribe(events.append):
        yield events


def emit(event: TraceEvent) -> None:
    """Hand an event to all observers. For the device model."""
    for sink in sinks:
        sink(event)
