"""What every test of the framework leaves behind as it found it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

_REGISTRY = "NPU_KERNEL_REGISTRY"
_BEFORE = os.environ.get(_REGISTRY)


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    """Adapters of made-up models name their own registry in the environment; it must not outlive the test."""
    yield
    if _BEFORE is None:
        os.environ.pop(_REGISTRY, None)
    else:
        os.environ[_REGISTRY] = _BEFORE
