"""Registry and twin without `llms`: what others add comes by entry points, and a missing one is said."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from npu_twin.extensions import ExtensionMissing, extension, kernel_references

PROJECT = Path(__file__).resolve().parents[2]
WITHOUT_LLMS = """
import sys
class NoLlms:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "llms":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, NoLlms())
from %s import main
sys.exit(main(sys.argv[1:]))
"""


def run(module: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command of the registry or the twin in a process where `llms` does not exist."""
    code = WITHOUT_LLMS % module
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_the_references_of_this_project_are_offered() -> None:
    from llms.llama_kernel_builder import bench
    from llms.verify.reference import kernels

    assert kernel_references() is kernels
    assert extension("npu_kernel_bench", "silicon") is bench.silicon


def test_a_missing_extension_names_group_and_remedy() -> None:
    with pytest.raises(ExtensionMissing, match=r"offers 'x' of the entry-point group nobody.*pip install"):
        extension("nobody", "x")


def test_the_registry_works_without_the_references(tmp_path: Path) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        name, *rest = arguments
        return run("kernel_registry.cli", name, "--registry", str(tmp_path / "r"), *rest, cwd=tmp_path)

    swept = command("sweep", "silu_mul", "4096", "--no-numerics")
    assert swept.returncode == 0, swept.stderr
    assert "added     silu_mul 4096" in swept.stdout
    assert command("check").returncode == 0
    refused = command("sweep", "silu_mul", "8192")
    assert refused.returncode == 1
    assert "error: error figures (--no-numerics leaves them out): entry point 'fp32'" in refused.stderr
    assert "install its package with all its dependencies" in refused.stderr
    silicon = command("sweep", "silu_mul", "8192", "--npu")
    assert silicon.returncode == 1
    assert "error: --npu: entry point 'silicon' of npu_kernel_bench" in silicon.stderr


def test_the_validation_says_that_references_are_missing(tmp_path: Path) -> None:
    refused = run("npu_twin.validate.__main__", "--processes", "1", cwd=tmp_path)
    assert refused.returncode == 2
    assert "entry point 'fp32' of npu_kernel_references" in refused.stderr
    assert "--no-numerics leaves the error figures out" in refused.stderr


def named_packages(source: str) -> set[str]:
    """First parts of what a module imports, and of every string that is a dotted name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.partition(":")[0].split(".")
            found |= {parts[0]} if len(parts) > 1 and all(map(str.isidentifier, parts)) else set()
    return found


def imports_of(folder: str, forbidden: set[str]) -> dict[str, set[str]]:
    files = sorted((PROJECT / folder).rglob("*.py"))
    assert len(files) > 2
    return {
        str(path.relative_to(PROJECT)): wrong
        for path in files
        if (wrong := named_packages(path.read_text(encoding="utf-8")) & forbidden)
    }


def test_the_registry_imports_nothing_of_llms() -> None:
    assert imports_of("kernel_registry", {"llms", "pytest_npu", "npu_deploy"}) == {}


def test_phase_1_imports_neither_toolkit_nor_twin_nor_registry() -> None:
    forbidden = {"kernel_registry", "npu_twin", "pytest_npu", "npu_deploy"}
    assert imports_of("llms/verify/gates/phase1", forbidden) == {}
    assert imports_of("llms/verify/reference/kernels", forbidden) == {}
    for folder in ("llms/verify/gates/phase1", "llms/verify/reference/kernels"):
        for path in (PROJECT / folder).rglob("*.py"):
            assert "llama_kernel_builder" not in path.read_text(encoding="utf-8"), path


def test_a_wrong_import_shows() -> None:
    for source in ("import llms.verify", "from llms import phase1", "load('llms.faults')", "x = 'llms.a:b'"):
        assert "llms" in named_packages(source)
    assert named_packages("'see llms.verify of this project'") == set()
