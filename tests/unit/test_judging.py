"""The list of what judges is whole: a walk over the packages and over what gates, tests and audit import."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_npu.ledger import judging

ROOT = Path(__file__).resolve().parents[2]


def modules(root: Path) -> dict[str, Path]:
    """Every module of the packages: name -> source."""
    paths = (path for package in judging.PACKAGES for path in (root / package).rglob("*.py"))
    return {judging.module_name(path, root): path for path in paths}


def model_folders(root: Path) -> list[str]:
    return [f"llms.{path.parent.name}" for path in (root / "llms").glob("*/verify_adapter.py")]


def of_a_model(name: str, models: list[str]) -> bool:
    return any(name == model or name.startswith(f"{model}.") for model in models)


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules that one module imports anywhere in its source, or names in a string, with their packages."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if "." in node.value else []
        for found in names:
            parts = found.split(".")
            if found in known:
                yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))


def reached(root: Path) -> dict[str, str]:
    """What gates, model tests and audit run: module -> who imports it. Model folders count as their own."""
    known, models = modules(root), model_folders(root)
    # a gate finds the adapter by its file, so no import of a test leads to it
    starts = [name for name in known if of_a_model(name, models)]
    starts += [
        name for name in known if name.startswith(("llms.verify.gates.", "llms.verify.ladder.", "llms.audit"))
    ]
    assert len(starts) > 60
    found = dict.fromkeys(starts, "a gate")
    waiting = list(starts)
    while waiting:
        name = waiting.pop()
        if not of_a_model(name, models) and judging.part_of(name) is None:
            continue  # declared to judge nothing: what it imports does not judge either
        for other in imported(name, known[name], known):
            if other not in found:
                found[other] = name
                waiting.append(other)
    return {name: by for name, by in found.items() if not of_a_model(name, models)}


def problems(root: Path) -> list[str]:
    """Modules in no list, and imports of a gate that only a whole package (`name.*`) declares harmless."""
    wrong = []
    for name in modules(root):
        if not of_a_model(name, model_folders(root)):
            try:
                judging.part_of(name)
            except LookupError as error:
                wrong.append(str(error))
    if wrong:
        return wrong
    for name, by in reached(root).items():
        if judging.part_of(name) is None and name not in judging.NOT_JUDGING:
            wrong.append(f"{name} is imported by {by}: it judges, or NOT_JUDGING says for itself why not")
    return wrong


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in judging.PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "tiny"))
    return tmp_path


def test_everything_that_gates_import_is_listed() -> None:
    assert problems(ROOT) == []
    found = reached(ROOT)
    for name in (
        "llms.verify.contract.deployment",
        "llms.verify.reference.matched",
        "llms.verify.reference.kernels.tolerances",
        "llms.checkpoints",
    ):
        assert judging.part_of(name) == "gates"
        assert name in found
    assert {"npu_twin.datapath.dispatch", "fixed_order.attention"} <= found.keys()


@pytest.mark.parametrize(
    ("module", "importer", "line", "problem"),
    [
        (
            "llms/new_judge.py",
            "llms/verify/gates/phase1/gate.py",
            "from llms import new_judge",
            "llms.new_judge is neither",
        ),
        (
            "llms/verify/localise/new_judge.py",
            "llms/qwen2/tests/test_phase4_prefill.py",
            "from llms.verify.localise import new_judge",
            "llms.verify.localise.new_judge is imported by llms.qwen2.tests.test_phase4_prefill",
        ),
        (
            "kernel_registry/new_judge.py",
            "llms/verify/gates/phase6/gate.py",
            "import importlib; judge = importlib.import_module('kernel_registry.new_judge')",
            "kernel_registry.new_judge is imported by llms.verify.gates.phase6.gate",
        ),
    ],
)
def test_a_judge_outside_the_list_is_found(
    copy: Path, module: str, importer: str, line: str, problem: str
) -> None:
    (copy / module).write_text("LIMIT = 1e9\n")
    with (copy / importer).open("a") as stream:
        stream.write(f"{line}\n")
    (found,) = problems(copy)
    assert found.startswith(problem)


def test_no_entry_outlives_its_code(copy: Path) -> None:
    for name in judging.NOT_JUDGING:
        place = ROOT.joinpath(*name.removesuffix(".*").split("."))
        assert place.is_dir() or place.with_suffix(".py").is_file(), name
    (copy / "llms" / "audit.py").rename(copy / "llms" / "first.py")
    with pytest.raises(LookupError, match=r"lists llms\.audit, but there is no such code"):
        judging.judging_files(copy)


def test_files_and_modules_are_those_of_the_lists() -> None:
    files = judging.judging_files()
    everything = {path.relative_to(ROOT).as_posix(): part for part, paths in files.items() for path in paths}
    assert len(everything) == sum(map(len, files.values()))
    assert everything["llms/verify/ladder/thresholds.json"] == "gates"
    assert everything["llms/verify/contract/prompt_sets/base.txt"] == "gates"
    assert everything["npu_twin/data/published_kernels.json"] == "twin"
    assert everything["llms/llama_kernel_builder/deployment/session.py"] == "toolkit"
    for name in ("kernel_registry/store.py", "npu_twin/validate/plots.py", "llms/qwen2/verify_adapter.py"):
        assert name not in everything
    found = judging.judging_modules()
    assert {"llms.verify.gates.phase7.checks", "llms.verify.reference.kernels.references"} <= set(found)
    assert not [name for name in found if name.endswith("__main__") or judging.part_of(name) is None]
