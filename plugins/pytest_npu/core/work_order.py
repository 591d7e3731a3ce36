"""Which model a free xdist worker takes next: the one that will take longest, known from the latest reports.

The last model to start decides when a parallel run ends. Without reports of earlier runs the order is that of
the collection.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pytest_npu.report.results import RESULTS_FILE

#: Runs per model that are read; the last one is not enough, as it may be of one phase only.
RUNS = 3

Unit = Mapping[str, bool]


def known_durations(report_dir: Path, models: Iterable[str]) -> dict[str, float]:
    """Seconds of every test in the latest runs of the models, by node id; the newest run wins."""
    durations: dict[str, float] = {}
    for model in models:
        paths = sorted((report_dir / model).glob(f"*/{RESULTS_FILE}"), key=_age)[-RUNS:]
        for path in paths:
            try:
                tests = json.loads(path.read_text(encoding="utf-8"))["tests"]
                durations.update(
                    {test["nodeid"]: float(test["duration_s"]) for test in tests if test["duration_s"]}
                )
            except (OSError, ValueError, KeyError, TypeError):
                continue  # a run folder of another release, or one that is being written
    return durations


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, str(path)
    except OSError:
        return 0.0, str(path)


class LongestFirst(OrderedDict[str, Unit]):
    """A work queue of pytest-xdist's scope schedulers, which take units with `popitem(last=False)`."""

    def __init__(self, durations: Callable[[], Mapping[str, float]]) -> None:
        super().__init__()
        self._read = durations
        self._durations: Mapping[str, float] | None = None

    def popitem(self, last: bool = True) -> tuple[str, Unit]:
        """Take the unit that will take longest; the first of equals."""
        if last or not self:
            return super().popitem(last)
        if self._durations is None:
            self._durations = self._read()
        durations = self._durations
        key = max(self, key=lambda name: sum(durations.get(nodeid, 0.0) for nodeid in self[name]))
        return key, self.pop(key)
