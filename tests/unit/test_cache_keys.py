"""A cached run or calibration counts only for the source that made it, wherever that source lies."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llms.verify.ladder import calibration
from llms.verify.reference import matched as matched_reference
from llms.verify.reference.cache import source_hash
from llms.verify.reference.matched_model import MatchedModel

# In the key of every run (`implementation`), or no part of a measured value.
ELSEWHERE = (
    "llms.verify.reference.arithmetic",
    "llms.verify.reference.matched",
    "llms.verify.reference.cache",
)
LIMITS = "llms.verify.ladder.thresholds"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "measuring_things"
    (folder / "inner").mkdir(parents=True)
    for name in ("__init__", "one", "two", "inner/__init__", "inner/deep"):
        (folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


NAMES = ("measuring_things.one", "measuring_things.inner")


@pytest.mark.parametrize("changed", ["one.py", "inner/__init__.py", "inner/deep.py"])
def test_a_change_of_any_source_is_another_key(package: Path, changed: str) -> None:
    before = source_hash(NAMES)
    (package / "two.py").write_text("NAME = 'not asked for'\n")
    assert source_hash(NAMES) == before
    (package / changed).write_text("NAME = 'other'\n")
    assert source_hash(NAMES) != before


def test_a_moved_module_is_no_empty_key(package: Path) -> None:
    source_hash(NAMES)
    (package / "one.py").rename(package / "first.py")
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match=r"measuring_things\.one, whose source"):
        source_hash(NAMES)


def test_no_modules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="would accept every old entry"):
        source_hash(())
    monkeypatch.setattr(calibration, "MEASURED_BY", ())
    calibration._procedures_hash.cache_clear()
    with pytest.raises(ValueError, match="would accept every old entry"):
        calibration._procedures_hash()


def test_everything_that_calibration_measures_with_is_in_its_key() -> None:
    """By where it is defined: a module that only hands names on does not stand in for it."""
    used: dict[str, Any] = {
        name: value
        for name, value in vars(calibration).items()
        if str(getattr(value, "__module__", "")).startswith("llms.verify.")
    }
    assert {"teacher_forced", "layer_check", "edges", "capture_forced", "kl"} <= set(used)
    missing = {
        f"{name} of {value.__module__}"
        for name, value in used.items()
        if value.__module__ not in (*calibration.MEASURED_BY, LIMITS)
        and not value.__module__.startswith(ELSEWHERE)
    }
    assert missing == set()


def test_the_arithmetic_is_in_the_key_of_a_run() -> None:
    from llms.verify.reference.arithmetic import products

    named = matched_reference._IMPLEMENTATION
    assert MatchedModel.__module__ in named
    assert products.__name__.rpartition(".")[0] in named
