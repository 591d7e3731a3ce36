"""Where the time goes: sections of a run, on the device clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from . import timeline
from .driver import Clock, LaunchEvent


@dataclass
class Entry:
    """Accumulated calls of one item. Times in seconds, bytes where they are moved."""

    calls: int = 0
    total_s: float = 0.0
    nbytes: int = 0
    min_s: float = float("inf")
    max_s: float = 0.0

    def add(self, seconds: float, nbytes: int) -> None:
        """Count one call."""
        self.calls += 1
        self.total_s += seconds
        self.nbytes += nbytes
        self.min_s = min(self.min_s, seconds)
        self.max_s = max(self.max_s, seconds)


@dataclass
class Profiler:
    """Collects (section, kind, name) -> Entry while it is enabled.

    kinds: `elf` (one NPU run), `kernel` (one launch inside an ELF, only where the device traces
    it), `host` (declared host operation), `bo_write`, `bo_read`. Sections are `prefill` and
    `decode`. Disabled, it costs one attribute test per call.
    """

    clock: Clock
    enabled: bool = False
    section_name: str = ""
    entries: dict[tuple[str, str, str], Entry] = field(default_factory=dict)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Attribute everything inside to `name`, including the device's own launch trace."""
        previous, self.section_name = self.section_name, name
        begin = self.clock.now()
        try:
            launches: list[LaunchEvent] = []
            with self.clock.watch_launches(launches.append) if self.enabled else nullcontext():
                yield
            for event in launches:
                self.add("kernel", event.launch, event.duration_s)
        finally:
            self.section_name = previous
            if timeline.recorders:
                timeline.record(self.clock, timeline.SECTIONS, "section", name, begin)

    def add(self, kind: str, name: str, seconds: float, nbytes: int = 0) -> None:
        """Count one call of an item in the current section."""
        self.entries.setdefault((self.section_name, kind, name), Entry()).add(seconds, nbytes)

    def timed(self, kind: str, name: str, nbytes: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``call(*arguments)``, counted while enabled."""
        if not self.enabled:
            return call(*arguments)
        begin = self.clock.now()
        result = call(*arguments)
        self.add(kind, name, self.clock.now() - begin, nbytes)
        return result

    def reset(self) -> None:
        """Forget everything collected."""
        self.entries.clear()

    def breakdown(self) -> list[dict[str, Any]]:
        """Rows for reports, the largest first: section, kind, name, calls, times in ms, megabytes moved."""
        rows = [
            {
                "section": section,
                "kind": kind,
                "name": name,
                "calls": entry.calls,
                "total_ms": entry.total_s * 1e3,
                "per_call_ms": entry.total_s * 1e3 / entry.calls,
                "min_ms": entry.min_s * 1e3,
                "max_ms": entry.max_s * 1e3,
                "mb": entry.nbytes / 1e6,
            }
            for (section, kind, name), entry in self.entries.items()
        ]
        return sorted(rows, key=lambda row: (row["section"], row["kind"], -row["total_ms"]))
