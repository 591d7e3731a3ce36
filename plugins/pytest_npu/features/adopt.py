"""`--npu-adopt PATH`: gates over deployments that exist already, each in a process of its own.

PATH is a folder with a `verify_adapter.py` as the LLM examples of Xilinx/mlir-air have it, or a folder of
such folders. Nothing of it is imported here: `llms.verify.foreign.deployment` starts a worker per gate.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_npu.core.constants import ADAPTER_FILE
from pytest_npu.core.state import NpuState, state_of

if TYPE_CHECKING:
    from llms.verify.foreign.deployment import Adopted
    from llms.verify.foreign.gates import Gate


class AdoptedWeakness(UserWarning):
    """An adopted deployment does something that is harmless only as long as something else holds."""


class GateFailed(Exception):
    """The text is the whole story: no traceback of ours helps with a foreign adapter."""


def adapters_of(paths: Iterable[Path]) -> tuple[Path, ...]:
    """The folders with an adapter at or below the given paths. Raises pytest.UsageError for none."""
    found: list[Path] = []
    for path in paths:
        if (path / ADAPTER_FILE).is_file():
            found.append(path)
        elif path.is_dir() and (below := sorted(p.parent for p in path.glob(f"*/{ADAPTER_FILE}"))):
            found += below
        else:
            raise pytest.UsageError(
                f"--npu-adopt: no {ADAPTER_FILE} in {path} nor in its direct subfolders; name the folder of "
                "a deployed model, or the folder that holds several"
            )
    return tuple(dict.fromkeys(folder.resolve() for folder in found))


def configure(state: NpuState) -> None:
    """Register the collector when deployments are to be adopted."""
    folders = adapters_of(state.options.adopt)
    if folders:
        state.config.pluginmanager.register(AdoptHooks(state.config, folders), "npu-adopt")


class AdoptHooks:
    """Registered with `--npu-adopt` only."""

    def __init__(self, config: pytest.Config, folders: tuple[Path, ...]) -> None:
        self._folders = folders
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args[:] = []  # nothing was named: only what is adopted runs

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Add the gates before anybody selects; `pytest_collection_modifyitems`.

        They hang on the session and not on their folders, as collecting a folder imports the conftest.py
        files above it.
        """
        root = session.config.rootpath
        for folder in self._folders:
            nodeid = f"{_shown(folder, root)}/{ADAPTER_FILE}"
            items.extend(AdoptedAdapter.from_parent(session, path=folder, nodeid=nodeid).collect())


class AdoptedAdapter(pytest.File):
    """One adapter with its gates."""

    adopted: Adopted | None = None

    def collect(self) -> Iterable[pytest.Item]:
        """One item per gate, marked with its phase."""
        from llms.verify.foreign.gates import GATES

        for gate in GATES:
            item: AdoptedGate = AdoptedGate.from_parent(
                self, name=gate.name, gate=gate, path=self.path / ADAPTER_FILE
            )
            item.add_marker(f"phase{gate.phase}")
            yield item

    def open(self) -> Adopted:
        """The adapter as the gates see it; opened once, its deployment goes to the report."""
        if self.adopted is None:
            from llms.verify.foreign.deployment import Adopted, Settings

            state = state_of(self.config)
            options = state.options
            self.adopted = Adopted(
                self.path,
                Settings(
                    checkpoint=options.checkpoint,
                    choice=options.model,
                    prompts=options.prompts,
                    n_tokens=options.n_tokens,
                    silicon=options.npu,
                    use_cache=options.use_cache,
                    limit_s=options.hang_timeout,
                    device=state.make_lock,
                ),
            )
            _announce(state, self.adopted)
        return self.adopted


def _shown(path: Path, root: Path) -> str:
    """A path as node ids have it: relative to the root folder, absolute outside of it."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def _announce(state: NpuState, adopted: Adopted) -> None:
    from llms.verify.foreign.process import AdoptedError

    try:
        facts = adopted.facts()
    except AdoptedError:
        return  # the gate that needs it says why
    state.emit("deployment", model=adopted.name, folder=str(adopted.folder), **facts)


class AdoptedGate(pytest.Item):
    """A gate on an adopted deployment."""

    def __init__(self, *, gate: Gate, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.gate = gate

    def runtest(self) -> None:
        """Judge; a verdict that is not ok, or an adapter that cannot be judged, fails."""
        from llms.verify.foreign.process import AdoptedError

        parent = self.parent
        assert isinstance(parent, AdoptedAdapter)
        state = state_of(self.config)
        adopted = parent.open()
        try:
            verdict = self.gate.judge(adopted)
        except AdoptedError as error:
            raise GateFailed(f"{adopted.name}, {self.gate.name}: {error}") from None
        state.emit(
            "record", model=adopted.name, nodeid=self.nodeid, kind=verdict.kind, payload=verdict.payload
        )
        for note in (*verdict.notes, *adopted.take_remarks()):
            warnings.warn(AdoptedWeakness(f"{adopted.name}, {self.gate.name}: {note}"), stacklevel=1)
        if not verdict.ok:
            raise GateFailed(f"{adopted.name}, {self.gate.name}:\n{verdict.message}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str | Any:
        """The verdict's own text."""
        if excinfo.errisinstance(GateFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the item stands in reports."""
        return self.path, None, f"{self.path.parent.name}: {self.gate.name}"
