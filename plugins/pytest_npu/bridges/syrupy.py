"""syrupy: a device error never deletes a snapshot.

With `--snapshot-update` syrupy removes snapshots that no assertion used, also those of a test that ended in
an error before it got to its assertion. Such a test is shown to syrupy as skipped: it keeps the snapshots of
skipped tests.
"""

from __future__ import annotations

import pytest


def keep_snapshots(config: pytest.Config, nodeid: str) -> None:
    """Keep the snapshots of a test that did not get as far as its assertions, when syrupy takes part."""
    ran_item = getattr(getattr(config, "_syrupy", None), "ran_item", None)
    if callable(ran_item):
        ran_item(nodeid, "skipped")
