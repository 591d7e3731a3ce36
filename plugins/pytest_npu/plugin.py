"""Hooks of every run with the plugin installed; each docstring names the hook it implements.

They are all that an unrelated suite pays for. The objects that do the work are made by `core.wake`, when an
option of ours is given or when a test of ours is met: only hooks of this module call it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_npu import newhooks
from pytest_npu.bridges import benchmark_fixture
from pytest_npu.core.constants import COLLECTION, EXPECTED_KEY, FD_ENV, SUITE
from pytest_npu.core.fixtures import (
    deployment,
    device_clock,
    hf_reference,
    model_folder,
    npu_deployments,
    npu_device,
    npu_lock,
    npu_options,
    npu_record,
)
from pytest_npu.core.flags import add_options, any_given
from pytest_npu.core.models import ModelFolders, is_ours, is_perf_test, reaches_models
from pytest_npu.core.phases import register_markers

if TYPE_CHECKING:
    from pytest_npu.core.collection import CollectionHooks

__all__ = [
    "deployment",
    "device_clock",
    "hf_reference",
    "model_folder",
    "npu_deployments",
    "npu_device",
    "npu_lock",
    "npu_options",
    "npu_record",
]

_FOLDERS: pytest.StashKey[ModelFolders] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register options; `pytest_addoption`."""
    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register our own hooks; `pytest_addhooks`."""
    pluginmanager.add_hookspecs(newhooks)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Become the supervisor of a run that wants one; `pytest_cmdline_main`."""
    if not config.getoption("npu") and not config.getoption("npu_supervise"):
        return None
    from pytest_npu.core.options import NpuOptions
    from pytest_npu.device.supervisor import Supervisor, wants_supervisor

    options = NpuOptions.from_config(config)
    return Supervisor(config, options).run() if wants_supervisor(config, options) else None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Markers and fixtures; the rest only when we are asked already; `pytest_configure`."""
    register_markers(config)
    pytest.register_assert_rewrite(SUITE)  # a name for later: nothing is imported
    config.stash[_FOLDERS] = ModelFolders()
    benchmark_fixture.register(config, _wake)
    if _is_wanted_now(config):
        _wake(config)


def _is_wanted_now(config: pytest.Config) -> bool:
    """True when waiting for the first test of ours would be too late."""
    if any_given(config) or FD_ENV in os.environ:
        return True
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        return bool(worker.get(EXPECTED_KEY))
    if config.getoption("dist", "no") != "no" and config.getoption("tx", None):
        return True  # a controller collects nothing; the tests of its workers may be ours
    # pytest-html asks for columns before the collection
    return bool(config.getoption("htmlpath", None)) and reaches_models(config)


def _wake(config: pytest.Config) -> CollectionHooks:
    """Take part in this run, once; the object that takes the collection."""
    collection: CollectionHooks | None = config.pluginmanager.getplugin(COLLECTION)
    if collection is None:
        from pytest_npu.core.wake import wake

        collection = wake(config)
    return collection


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    """Wake before the first test module of a model is imported; `pytest_collect_file`."""
    config = parent.config
    if file_path.suffix == ".py" and config.stash[_FOLDERS].of(file_path) is not None:
        with contextlib.suppress(pytest.UsageError):  # raised again when the collection is over: exit code 4
            _wake(config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, Any, Any]:
    """Select and order after everybody else; `pytest_collection_modifyitems`."""
    if getattr(config, "workerinput", None) and any(is_perf_test(item) for item in items):
        _wake(config).deselect_perf_tests(items)  # before pytest-benchmark warns of each
    result = yield
    folders = config.stash[_FOLDERS]
    if config.pluginmanager.has_plugin(COLLECTION) or any(is_ours(item, folders) for item in items):
        _wake(config).take(items)
    return result


def pytest_npu_reports(config: pytest.Config, folders: dict[str, Path]) -> None:
    """Keep the verdicts of whole phases in the models' gate ledgers; `pytest_npu_reports`.

    Here, as the supervisor of a run has reports and none of the other objects.
    """
    from pytest_npu.ledger.feature import keep_verdicts

    keep_verdicts(config, folders)
