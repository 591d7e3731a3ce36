"""`--npu-bisect`: after a gate that failed, name the first kernel, host operation or buffer that is wrong.

The verdict is a section of the failed test's report and a record of kind `bisect`.
It is found once per model and run: the next gate that fails shows the same.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from pytest_npu.core.events import to_jsonable
from pytest_npu.core.state import NpuState

#: Phases whose gates judge the whole of a model or a block of it.
PHASES = (2, 3, 4, 5, 6)
SECTION = "npu bisect"


def configure(state: NpuState) -> None:
    """Register the hook when it was asked for."""
    if state.options.bisect:
        state.config.pluginmanager.register(BisectHooks(state), "npu-bisect")


class BisectHooks:
    """Registered with `--npu-bisect` only."""

    def __init__(self, state: NpuState) -> None:
        self._state = state
        self._found: dict[Path | None, tuple[str, dict[str, Any]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Bisect while the fixtures of the failed test are still there; `pytest_runtest_makereport`."""
        report = yield
        info = self._state.tests.get(item.nodeid)
        fixtures = getattr(item, "funcargs", {})
        if report.when != "call" or not report.failed or info is None or info.phase not in PHASES:
            return report
        if "deployment" not in fixtures:
            return report
        if info.folder not in self._found:
            self._found[info.folder] = self._bisect(fixtures["deployment"])
        text, payload = self._found[info.folder]
        report.sections.append((SECTION, text))
        if payload:
            self._state.emit(
                "record",
                model=info.model,
                nodeid=item.nodeid,
                kind="bisect",
                payload=to_jsonable(payload, "bisect"),
            )
        return report

    def _bisect(self, deployment: Any) -> tuple[str, dict[str, Any]]:
        """Text and payload; an error of the bisect is its text, as the gate has failed already."""
        from llms.verify import localise as bisect

        try:
            report = bisect.find(deployment, device=self._state.make_lock())
        except Exception as error:
            return f"the bisect itself failed: {type(error).__name__}: {error}", {}
        return report.text(), report.payload()
