"""What `--npu` asks of the collected models: an artefact for every program, and memory for their weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_npu.device.preflight.feature import Fact, model_facts, refuse_bad

if TYPE_CHECKING:
    from pytest_npu.core.state import NpuState

#: A test that opens the device outside of the phases runs the model as it is deployed.
PRODUCTION = 6
#: Bisecting exchanges kernels one by one in the form of this phase: one ELF per kernel.
BISECT = 3


class SiliconHooks:
    """Registered with `--npu` only."""

    def __init__(self, state: NpuState) -> None:
        self._state = state

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse a run whose models cannot work here; `pytest_collection_finish`."""
        state = self._state
        facts: list[Fact] = []
        for folder, (phases, kernels) in sorted(self._selected(session).items()):
            facts += model_facts(folder, phases, kernels, state.options)
        if facts and state.active:
            state.emit("preflight", facts=facts)
        refuse_bad(facts)

    def _selected(self, session: pytest.Session) -> dict[Path, tuple[set[int], list[Any]]]:
        """Phases and kernel cases of the selected tests, by model folder."""
        selected: dict[Path, tuple[set[int], list[Any]]] = {}
        for item in session.items:
            info = self._state.tests.get(item.nodeid)
            if info is None or info.folder is None:
                continue
            phases, kernels = selected.setdefault(info.folder, (set(), []))
            if info.phase is not None:
                phases.add(info.phase)
            elif info.device:
                phases.add(PRODUCTION)
            if self._state.options.bisect:
                phases.add(BISECT)
            call = getattr(item, "callspec", None)
            kernels += [call.params["kernel"]] if call is not None and "kernel" in call.params else []
        return selected
