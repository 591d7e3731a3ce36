"""A pytest plugin for `npu-deploy run`: seconds of compilation per test, as JSON lines.

Loaded with ``-p npu_deploy.phase_clock``; the file is named by the environment variable `NPU_DEPLOY_CLOCK`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ENV = "NPU_DEPLOY_CLOCK"
_spent = 0.0


def pytest_configure(config: pytest.Config) -> None:
    """Time every look into the artefact store: it compiles what it does not have.

    Folders outside of this project lack its pytest settings, so the marker of long tests is made known here.
    """
    config.addinivalue_line("markers", "slow: takes more than about 20 s")
    if not os.environ.get(ENV):
        return
    from llms.llama_kernel_builder.artefacts import ArtefactStore

    original = ArtefactStore.get

    def timed(self: ArtefactStore, program: Any) -> Any:
        global _spent
        begin = time.perf_counter()
        try:
            return original(self, program)
        finally:
            _spent += time.perf_counter() - begin

    ArtefactStore.get = timed  # type: ignore[method-assign]
    config.add_cleanup(lambda: setattr(ArtefactStore, "get", original))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Write the seconds of one test."""
    before = _spent
    result = yield
    path = os.environ.get(ENV)
    if path:
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"nodeid": item.nodeid, "compile_s": _spent - before}) + "\n")
    return result


def read(path: Path) -> dict[str, float]:
    """Seconds of compilation by node id."""
    found: dict[str, float] = {}
    if not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found[entry["nodeid"]] = found.get(entry["nodeid"], 0.0) + float(entry["compile_s"])
    return found
