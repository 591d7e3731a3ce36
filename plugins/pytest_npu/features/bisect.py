"""`--npu-bisect`: after a gate that failed, name the first kernel, host operation or buffer that is wrong.

The verdict is a section of the failed test's report and a record of kind `bisect`.
It is found once per model and run: the next gate that fails shows the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from pytest_npu.core.events import to_jsonable
from pytest_npu.core.state import NpuState, TestInfo

#: Phases whose gates judge the whole of a model or a block of it.
PHASES = (2, 3, 4, 5, 6)
SECTION = "npu bisect"


def configure(state: NpuState) -> None:
    """Register the hook."""
    hooks = BisectHooks(state.tests, state.make_lock, state.emit)
    state.config.pluginmanager.register(hooks, "npu-bisect")


class BisectHooks:
    """Registered with `--npu-bisect` only; owns the answers of this run by model folder.

    tests: what is known of every collected test, by node id. make_lock: the lock to hold while the device
    works. emit: sends an event to the log.
    """

    def __init__(
        self,
        tests: Mapping[str, TestInfo],
        make_lock: Callable[[], AbstractContextManager[Any]],
        emit: Callable[..., None],
    ) -> None:
        self._tests, self._make_lock, self._emit = tests, make_lock, emit
        self._answers: dict[Path | None, tuple[str, dict[str, Any]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Bisect while the fixtures of the failed test are still there; `pytest_runtest_makereport`."""
        report = yield
        info = self._tests.get(item.nodeid)
        fixtures = getattr(item, "funcargs", {})
        if report.when != "call" or not report.failed or info is None or info.phase not in PHASES:
            return report
        if "deployment" not in fixtures:
            return report
        if info.folder not in self._answers:
            self._answers[info.folder] = self._bisect(fixtures["deployment"])
        text, payload = self._answers[info.folder]
        report.sections.append((SECTION, text))
        if payload:
            payload = to_jsonable(payload, "bisect")
            self._emit("record", model=info.model, nodeid=item.nodeid, kind="bisect", payload=payload)
        return report

    def _bisect(self, deployment: Any) -> tuple[str, dict[str, Any]]:
        """Text and payload; an error of the bisect is its text, as the gate has failed already."""
        from llms.verify import localise

        try:
            report = localise.find(deployment, device=self._make_lock())
        except localise.BisectNotOffered as error:
            return str(error), {}
        except Exception as error:
            return f"the bisect itself failed: {type(error).__name__}: {error}", {}
        return report.text(), report.payload()
