"""The bench is importable; what the driver was asked can be read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def ioctl_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with a line per context created or closed and per command."""
    path = tmp_path / "ioctls"
    path.write_text("")
    monkeypatch.setenv("FX_LOG", str(path))
    return path
