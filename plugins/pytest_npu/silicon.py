"""What `--npu` asks of the collected models: an artefact for every program, and memory for their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .preflight import Fact, model_facts, refuse_bad

if TYPE_CHECKING:
    from .state import NpuState


class SiliconHooks:
    """Registered with `--npu` only."""

    def __init__(self, state: NpuState) -> None:
        self._state = state

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Refuse a run whose models cannot work here; `pytest_collection_finish`."""
        state = self._state
        folders = {info.folder for info in state.tests.values() if info.folder is not None}
        facts: list[Fact] = [found for folder in sorted(folders) for found in model_facts(folder)]
        if facts and state.active:
            state.emit("preflight", facts=facts)
        refuse_bad(facts)


def register(state: NpuState) -> None:
    """Check the collected models when the run is for silicon."""
    if state.options.npu:
        state.config.pluginmanager.register(SiliconHooks(state), "npu-silicon")
