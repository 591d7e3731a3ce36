"""Settings of this repository's own tests; everything else is in the plugin `pytest_npu`."""

from __future__ import annotations

import os

# Before any test module imports torch. The plugin does the same, but not before it meets a test of a model.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ["pytester"]
