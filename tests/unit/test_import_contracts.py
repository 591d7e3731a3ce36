"""`make lint` refuses an import that points the wrong way, also one that is a string."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.import_contracts import named_in

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("npu_deploy", "npu_twin", "kernel_registry", "llms", "tools", "plugins")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and their contracts, free to be broken."""
    copy = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("*.safetensors", "*.json", "*.pyc", "__pycache__", "tiny")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """The command of `make lint`, on a copy of the tree."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'plugins'}"}
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as c; c()",
        "--no-cache",
    ]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("module", "line", "named"),
    [
        (
            "llms/verify/contract/topk.py",
            "import llms.llama_kernel_builder.specs",
            "llms.verify.contract.topk",
        ),
        ("npu_twin/clock.py", "def late():\n    import kernel_registry.store", "npu_twin.clock"),
        ("npu_twin/clock.py", "SOURCE = 'llms.faults'", "npu_twin.clock"),
        ("plugins/pytest_npu/core/phases.py", "import npu_deploy.run", "pytest_npu.core.phases"),
    ],
)
def test_a_planted_import_turns_lint_red(tree: Path, module: str, line: str, named: str) -> None:
    path = tree / module
    whole = path.read_text(encoding="utf-8")
    path.write_text(f"{whole}\n{line}\n", encoding="utf-8")
    try:
        result = lint(tree)
    finally:
        path.write_text(whole, encoding="utf-8")
    assert result.returncode == 1, result.stdout + result.stderr
    assert named in result.stdout


def test_the_tree_as_it_is_keeps_all_contracts(tree: Path) -> None:
    result = lint(tree)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_a_module_named_in_prose_is_no_import() -> None:
    source = (
        '"""See llms.faults."""\nTEXT = "the faults of llms.faults are planted"\nNAME = "llms.faults.loop"\n'
    )
    assert [(one.line, one.text) for one in named_in("npu_twin.x", source, ("llms",))] == [
        (3, "llms.faults.loop")
    ]
