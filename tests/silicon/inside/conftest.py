"""The bench is importable, and no test inherits the planted faults of another."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _no_planted_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FX_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def ioctl_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with a line per context created or closed and per command."""
    path = tmp_path / "ioctls"
    path.write_text("")
    monkeypatch.setenv("FX_LOG", str(path))
    return path
