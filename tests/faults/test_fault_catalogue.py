"""The catalogue itself: complete, switchable, and without a trace when nothing is planted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_twin import compiler, faults, injection
from npu_twin.exceptions import CompileError
from npu_twin.faults import STAGES, Fault

ROOT = Path(__file__).resolve().parents[2]
# Entries of the catalogue of failure modes recorded upstream: A to E, with the numbers that are in use.
ENTRIES = {
    *(f"A{n}" for n in (*range(1, 10), 11, 12, *range(14, 27), 28, 30)),
    *(f"B{n}" for n in (*range(1, 9), 11)),
    *(f"C{n}" for n in (1, 2, 4, 5, 8, 10, *range(12, 20), 21)),
    *(f"D{n}" for n in (1, 2, 3, 5, 6, 8, 9, 10, 11, 12)),
    *(
        f"E{n}"
        for n in (1, 3, 4, 5, 6, *range(9, 14), 16, *range(18, 24), *range(25, 29), 30, 31, *range(33, 37))
    ),
}


# Faults of phase 0 that end in an error where somebody runs the model without phase 0.
MAY_CRASH = {"tensor_renamed", "other_tokenizer"}


def test_every_entry_is_planted_or_has_a_reason() -> None:
    planted = {fault.entry for fault in faults.load()} - {""}
    without = {one.entry for one in faults.UNPLANTED}
    assert planted | without == ENTRIES
    assert not planted & without


def test_names_are_unique_and_usable_on_a_command_line() -> None:
    names = faults.names()
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_-]+", name) for name in names)


@pytest.mark.parametrize("fault", faults.load(), ids=lambda fault: fault.name)
def test_fault_says_what_it_is_and_leaves_no_trace(fault: Fault) -> None:
    from llms.llama_kernel_builder import host_ops, llama_loop

    assert fault.what
    assert fault.origin
    assert fault.expected in STAGES
    assert bool(fault.raises) == (fault.expected in ("compile", "runtime") or fault.name in MAY_CRASH)
    before = _state(llama_loop, host_ops)
    with fault.plant():
        pass
    assert _state(llama_loop, host_ops) == before


def _state(*modules: Any) -> list[Any]:
    found: list[Any] = [injection.active, compiler.compile_program, compiler.TOOLCHAIN_IDENTITY]
    for module in modules:
        found.append({name: id(value) for name, value in vars(module).items()})
    return found


PROGRAM = {
    "name": "rms",
    "arguments": [
        {"name": "x", "shape": [16, 256], "dtype": "bf16", "role": "input"},
        {"name": "w", "shape": [256], "dtype": "bf16", "role": "static"},
        {"name": "y", "shape": [16, 256], "dtype": "bf16", "role": "intermediate"},
        {"name": "out", "shape": [16, 256], "dtype": "bf16", "role": "output"},
    ],
    "launches": [
        {
            "name": name,
            "op": "rms_norm",
            "method": "weighted",
            "dims": {"M": 16, "N": 256},
            "tile": {},
            "herd": [8, 1],
            "attrs": {"eps": 1e-6},
            "operands": {"x": {"arg": source}, "w": {"arg": "w"}, "out": {"arg": target}},
        }
        for name, source, target in (("first", "x", "y"), ("second", "y", "out"))
    ],
}


def test_the_program_compiles_without_a_fault() -> None:
    assert compiler.compile_program(PROGRAM).name == "rms"


@pytest.mark.parametrize(
    "fault", [f for f in faults.load() if f.raises == "CompileFailed"], ids=lambda fault: fault.name
)
def test_compiler_refuses_with_the_rule(fault: Fault) -> None:
    with fault.plant(), pytest.raises(CompileError, match=re.escape(fault.says)):
        compiler.compile_program(PROGRAM)


def test_rare_tile_strikes_in_the_second_round_of_a_deep_model_and_by_the_end_of_a_shallow_one() -> None:
    from npu_twin.faults.device import _striking_seed

    assert _striking_seed(5e-4) == _striking_seed(5e-4)
    with pytest.raises(ValueError, match="no seed strikes"):
        _striking_seed(0.0)


def test_unknown_name_lists_the_names() -> None:
    with pytest.raises(KeyError, match="rope_theta_tenth"):
        faults.find("gremlin")


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "npu_twin.faults", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_list_as_json_has_every_fault() -> None:
    content = json.loads(run("list", "--json"))
    assert [fault["name"] for fault in content["faults"]] == list(faults.names())
    assert {one["entry"] for one in content["unplanted"]} == {one.entry for one in faults.UNPLANTED}


def test_list_as_text_names_stage_and_predicate() -> None:
    lines = run("list").splitlines()
    (line,) = [line for line in lines if line.startswith("head_as_tied ")]
    assert "phase0" in line
    assert "(an LM head of its own)" in line


def test_importing_the_catalogue_imports_neither_deployments_nor_torch() -> None:
    code = "import sys, npu_twin.faults; print([m for m in ('llms', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


ADDED = """
from contextlib import contextmanager
from npu_twin.faults import Fault

state = []

@contextmanager
def plant():
    state.append("there")
    yield
    state.clear()

FAULTS = (Fault("{name}", "silent", "what", "origin", "phase3", plant),)
"""
QUESTIONS = """
import added
from npu_twin import faults

print(faults.names()[-1])
with faults.load()[-1].plant():
    print(added.state)
print(added.state)
"""


def with_a_package(folder: Path, name: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code where another distribution adds one fault."""
    (folder / "added.py").write_text(ADDED.format(name=name))
    metadata = folder / "zz_added-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: zz-added\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[npu_faults]\nzz_added = added:FAULTS\n")
    path = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    return subprocess.run([sys.executable, "-c", path + code], cwd=ROOT, capture_output=True, text=True)


def test_a_package_of_its_own_adds_faults_by_an_entry_point(tmp_path: Path) -> None:
    done = with_a_package(tmp_path, "of_another_package", QUESTIONS)
    assert done.stdout.splitlines() == ["of_another_package", "['there']", "[]"], done.stderr


def test_two_faults_of_one_name_are_refused(tmp_path: Path) -> None:
    done = with_a_package(tmp_path, "lm_head_hangs", "from npu_twin import faults; faults.load()")
    assert "two faults are called lm_head_hangs; the second is in added:FAULTS" in done.stderr


def test_without_any_entry_point_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "GROUP", "npu_faults_of_nobody")
    faults.load.cache_clear()
    try:
        with pytest.raises(LookupError, match="pip install -e"):
            faults.load()
    finally:
        faults.load.cache_clear()
