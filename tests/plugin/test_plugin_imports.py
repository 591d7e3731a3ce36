"""The plugin's own imports: no circle, one place that wakes it, no fixture that makes it take part."""

from __future__ import annotations

import subprocess
import sys

import grimp
import pytest


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("pytest_npu", exclude_type_checking_imports=True, cache_dir=None)


def test_no_module_imports_itself_by_way_of_others(graph: grimp.ImportGraph) -> None:
    circles = {
        name
        for name in graph.modules
        for imported in graph.find_modules_directly_imported_by(name)
        if name in graph.find_upstream_modules(imported) | {imported}
    }
    assert graph.modules
    assert circles == set()


def test_only_the_plugin_module_wakes(graph: grimp.ImportGraph) -> None:
    assert graph.find_modules_that_directly_import("pytest_npu.core.wake") == {"pytest_npu.plugin"}


def test_from_the_fixture_to_the_lock_is_a_short_walk(graph: grimp.ImportGraph) -> None:
    path = graph.find_shortest_chain("pytest_npu.core.fixtures", "pytest_npu.device.lock")
    assert path == ("pytest_npu.core.fixtures", "pytest_npu.core.state", "pytest_npu.device.lock")


def test_a_fixture_that_nobody_named_says_so(suite) -> None:
    suite.pytester.makepyfile("def test_late(request): request.getfixturevalue('npu_lock')")
    result = suite.run()
    result.assert_outcomes(errors=0, failed=1)
    result.stdout.fnmatch_lines(["*takes no part in this run*usefixtures*"])
    assert not (suite.path / "reports").exists()


def test_doctor_needs_no_package() -> None:
    """`python -m pytest_npu.device.preflight` where pytest, torch and the rest are missing."""
    code = """
import importlib.machinery, sys
allowed = {*sys.stdlib_module_names, "numpy", "pytest_npu"}
real = importlib.machinery.PathFinder
class Bare:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return real.find_spec(name, path, target) if name.partition(".")[0] in allowed else None
sys.meta_path = [finder for finder in sys.meta_path if finder is not real] + [Bare]
from pytest_npu.device.preflight.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "digital twin (default): not usable: " in done.stdout
    assert "BAD  torch: missing" in done.stdout
