"""Optional plugins beside this one: pytest-benchmark, xdist, html, syrupy, rerunfailures."""

from __future__ import annotations

import pytest


def has_benchmark(config: pytest.Config) -> bool:
    """True when pytest-benchmark is loaded, under whatever name."""
    return hasattr(config.hook, "pytest_benchmark_generate_json")
