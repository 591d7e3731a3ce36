"""Settings of this repository's own tests; everything else is in the plugin `pytest_npu`."""

from __future__ import annotations

pytest_plugins = ["pytester"]
