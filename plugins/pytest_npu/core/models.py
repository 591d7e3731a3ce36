"""Which model a test belongs to: the nearest folder above it that holds `verify_adapter.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from pytest_npu.core.constants import ADAPTER_FILE, DEVICE_FIXTURES, FIXTURES, NO_MODEL, PERF_FIXTURE
from pytest_npu.core.phases import phase_of


class ModelFolders:
    """Finds and remembers the model folder of paths. Asks the file system once per folder."""

    def __init__(self) -> None:
        self._known: dict[Path, Path | None] = {}

    def of(self, path: Path) -> Path | None:
        """The model folder above `path`, or None."""
        folder = path.parent
        if folder not in self._known:
            nearest = next((p for p in (folder, *folder.parents) if (p / ADAPTER_FILE).is_file()), None)
            self._known[folder] = nearest
        return self._known[folder]

    def of_nodeid(self, nodeid: str, rootpath: Path) -> Path | None:
        """The model folder of a test named by its node id."""
        return self.of(rootpath / nodeid.split("::", 1)[0])


def fixture_names(item: pytest.Item) -> frozenset[str]:
    """Names of all fixtures a test requests, directly or through others."""
    return frozenset(getattr(item, "fixturenames", ()))


def is_perf_test(item: pytest.Item) -> bool:
    """True for a test that measures on the device clock."""
    return PERF_FIXTURE in fixture_names(item)


def uses_device(item: pytest.Item) -> bool:
    """True for a test that opens the device."""
    return not DEVICE_FIXTURES.isdisjoint(fixture_names(item))


def is_ours(item: pytest.Item, folders: ModelFolders) -> bool:
    """True for a test that the plugin orders, logs and reports."""
    return (
        folders.of(item.path) is not None
        or phase_of(item) is not None
        or not FIXTURES.isdisjoint(fixture_names(item))
    )


def model_name(folder: Path | None) -> str:
    """Folder name of the model, or the name under which tests without a model are reported."""
    return NO_MODEL if folder is None else folder.name


def reaches_models(config: pytest.Config) -> bool:
    """True when the command line reaches a model folder; known before the collection."""
    start = Path(config.invocation_params.dir)
    paths = [start / arg.split("::", 1)[0] for arg in config.args]
    return bool(find_model_folders(path for path in paths if path.exists()))


def find_model_folders(starts: Iterable[Path]) -> set[Path]:
    """Model folders at, above or up to two levels below `starts`. Used before anything is collected."""
    folders: set[Path] = set()
    for start in starts:
        folder = start if start.is_dir() else start.parent
        folders.update(p for p in (folder, *folder.parents) if (p / ADAPTER_FILE).is_file())
        for depth in ("*", "*/*"):
            folders.update(p.parent for p in folder.glob(f"{depth}/{ADAPTER_FILE}"))
    return folders
