"""`--npu-adopt PATH`: the suite over deployments that exist already, each in processes of its own.

PATH is a folder with a `verify_adapter.py` as the LLM examples of Xilinx/mlir-air have it, or a folder of
such folders. Nothing of it is imported here: its deployment is opened by `llms.verify.foreign.remote`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_npu.core.constants import ADAPTER_FILE
from pytest_npu.core.state import NpuState

if TYPE_CHECKING:
    from llms.verify.foreign.remote import RemoteAdapter
    from pytest_npu.core.options import NpuOptions

TWIN_PYXRT = "npu_twin.pyxrt"
"""What a foreign deployment imports as `pyxrt` without `--npu`."""


def adapters_of(paths: Iterable[Path]) -> tuple[Path, ...]:
    """The folders with an adapter at or below the given paths. Raises pytest.UsageError for none."""
    adapters: list[Path] = []
    for path in paths:
        if (path / ADAPTER_FILE).is_file():
            adapters.append(path)
        elif path.is_dir() and (below := sorted(p.parent for p in path.glob(f"*/{ADAPTER_FILE}"))):
            adapters += below
        else:
            raise pytest.UsageError(
                f"--npu-adopt: no {ADAPTER_FILE} in {path} nor in its direct subfolders; name the folder of "
                "a deployed model, or the folder that holds several"
            )
    return tuple(dict.fromkeys(folder.resolve() for folder in adapters))


def configure(state: NpuState) -> None:
    """Register the collector."""
    hooks = AdoptHooks(state, adapters_of(state.options.adopt))
    state.config.pluginmanager.register(hooks, "npu-adopt")


class AdoptHooks:
    """Registered with `--npu-adopt` only. Its state: the adapters of the folders, made when one is needed."""

    def __init__(self, state: NpuState, folders: tuple[Path, ...]) -> None:
        self._state = state
        self._folders = folders
        self._adapters: dict[Path, RemoteAdapter] = {}
        if state.config.args_source is not pytest.Config.ArgsSource.ARGS:
            state.config.args[:] = []  # nothing was named: only what is adopted runs

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Add the tests before anybody selects; `pytest_collection_modifyitems`.

        They hang on the session and not on their folders, as collecting a folder imports the conftest.py
        files above it.
        """
        root = session.config.rootpath
        for folder in self._folders:
            path = folder / ADAPTER_FILE
            suite: AdoptedSuite = AdoptedSuite.from_parent(session, path=path, nodeid=_shown(path, root))
            items.extend(item for item in suite.collect() if isinstance(item, pytest.Item))

    @pytest.hookimpl(tryfirst=True)
    def pytest_npu_open_deployment(self, folder: Path, options: NpuOptions) -> Any:
        """Open an adopted folder; `pytest_npu_open_deployment`. Others are left to the default."""
        if folder not in self._folders:
            return None
        from llms.verify.foreign.remote import RemoteDeployment

        opened = RemoteDeployment(self._adapter(folder), use_cache=options.use_cache)
        _ = opened.checkpoint  # a missing one is one clear error, not one per gate
        return opened

    @pytest.fixture
    def foreign_adapter(self, request: pytest.FixtureRequest) -> RemoteAdapter:
        """The adapter of the adopted folder; nothing of it has been asked yet."""
        return self._adapter(request.path.parent)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Show an adapter that cannot be judged by its own story: no traceback of ours helps with it."""
        report = yield
        if call.excinfo is not None and self._adapters:
            from llms.verify.foreign.process import RemoteError

            if call.excinfo.errisinstance(RemoteError):
                report.longrepr = str(call.excinfo.value)
        return report

    def _adapter(self, folder: Path) -> RemoteAdapter:
        if folder not in self._adapters:
            from llms.verify.foreign.remote import RemoteAdapter, RemoteSettings

            options = self._state.options
            settings = RemoteSettings(
                checkpoint=options.checkpoint,
                choice=options.model,
                pyxrt=None if options.npu else TWIN_PYXRT,
                limit_s=options.hang_timeout,
                device=self._state.make_lock,
            )
            self._adapters[folder] = RemoteAdapter(folder, settings)
        return self._adapters[folder]


class AdoptedSuite(pytest.Module):
    """The suite of every model, collected for a folder that has no tests of ours and is not imported."""

    def _getobj(self) -> ModuleType:
        from llms.verify import suite
        from llms.verify.foreign import suite as foreign

        joined = ModuleType(f"{self.path.parent.name}_adopted")
        for part in (suite, foreign):  # what the second has takes the place of what the first has
            joined.__dict__.update({k: v for k, v in vars(part).items() if not k.startswith("__")})
        return joined


def _shown(path: Path, root: Path) -> str:
    """A path as node ids have it: relative to the root folder, absolute outside of it."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
