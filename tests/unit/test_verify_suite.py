"""The suite of the model folders and what it stands on: one device section, results kept per deployment."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llms.llama_kernel_builder import driver
from llms.verify import suite
from llms.verify.contract.abilities import NotOffered
from llms.verify.contract.deployment import Deployment
from llms.verify.contract.outcome import Outcome
from llms.verify.gates.phase3.gate import baseline_gate
from llms.verify.gates.phase4.gate import prefill_gate
from llms.verify.gates.phase5.gate import decode_gate
from llms.verify.gates.phase6.performance import set_up
from npu_deploy.scaffold import TEMPLATES

FILES = {path.name.removesuffix(".j2"): path.read_text() for path in (TEMPLATES / "tests").iterdir()}
LLMS = Path(__file__).resolve().parents[2] / "llms"


@pytest.fixture
def qwen2() -> Deployment:
    driver.select("twin")
    return Deployment.from_folder("qwen2", checkpoint=LLMS / "qwen2" / "tiny")


def imported(name: str) -> dict[str, str]:
    """What a test file imports from the suite, name -> name in the file."""
    node = ast.parse(FILES[name]).body[1]
    assert isinstance(node, ast.ImportFrom)
    assert node.module == suite.__name__
    return {alias.name: alias.asname or alias.name for alias in node.names}


def test_every_test_of_the_suite_is_in_one_file() -> None:
    files = [imported(name) for name in FILES]
    tests = [test for names in files for test in names if test.startswith("test_")]
    assert sorted(tests) == sorted(name for name in vars(suite) if name.startswith("test_"))
    for names in files:
        for name in names:
            assert hasattr(suite, name)


@pytest.mark.parametrize("name", FILES)
def test_the_phase_of_a_file_is_that_of_its_tests(name: str, tmp_path: Path) -> None:
    from pytest_npu.core.phases import phases_in

    path = tmp_path / name
    path.write_text(FILES[name])
    marked = {
        mark.name
        for test in imported(name)
        if test.startswith("test_")
        for mark in getattr(suite, test).pytestmark
        if mark.name.startswith("phase")
    }
    assert {f"phase{number}" for number in phases_in(path)} == marked


@pytest.mark.parametrize(
    ("name", "text", "phases"),
    [
        ("test_phase6_ladder.py", "# as in phase3\n", {6}),
        ("test_own.py", "pytestmark = pytest.mark.phase2\n", {2}),
        (
            "test_own.py",
            "@pytest.mark.phase2\ndef test(): ...\n@pytest.mark.phase5\ndef test2(): ...\n",
            {2, 5},
        ),
        ("test_own.py", "from llms.verify.gates.phase6 import gate\n", set()),
        ("test_own.py", '"""Sizes of the tables; phase 3 needs them."""\n', set()),
    ],
)
def test_phases_of_a_file_of_the_model(name: str, text: str, phases: set[int], tmp_path: Path) -> None:
    from pytest_npu.core.phases import phases_in

    path = tmp_path / name
    path.write_text(text)
    assert phases_in(path) == phases


def test_a_result_is_computed_once_and_an_error_is_no_reason_to_try_again(qwen2: Deployment) -> None:
    calls: list[str] = []

    def fail() -> int:
        calls.append("fail")
        raise OSError("the device is gone")

    for _ in range(3):
        with pytest.raises(OSError, match="the device is gone"):
            qwen2.once("pass", fail)
    assert calls == ["fail"]
    assert qwen2.once("pass", lambda: 5, retry=True) == 5
    assert qwen2.once("pass", fail) == 5
    assert qwen2.once("other", lambda: None) is None
    assert qwen2.once("other", fail) is None
    assert calls == ["fail"]


class Recorder:
    """A runner that notes what is done to it."""

    name = "recorder"

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def prepare(self, prompt_len: int) -> None:
        self.events.append(f"prepare {prompt_len}")

    def close(self) -> None:
        self.events.append("close")


def test_the_device_is_held_between_preparation_and_release(qwen2: Deployment) -> None:
    events: list[str] = []
    runner: Any = Recorder(events)

    @contextmanager
    def lock() -> Iterator[None]:
        events.append("held")
        try:
            yield
        finally:
            events.append("free")

    with qwen2.on_device(lock(), [7, 3, 7], runner=runner) as used:
        assert used is runner
        events.append("work")
    assert events == ["prepare 3", "prepare 7", "held", "work", "close", "free"]
    events.clear()
    with pytest.raises(ZeroDivisionError), qwen2.on_device(lock(), runner=runner):
        raise ZeroDivisionError
    assert events == ["held", "close", "free"]
    events.clear()
    with qwen2.on_device(runner=runner, keep=True):
        pass
    assert events == []


class Bare:
    """A runner of the bare contract."""

    name = "bare"


def test_what_a_foreign_runner_does_not_offer_is_skipped_never_passed(
    qwen2: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen2, "runner", lambda *args, **options: Bare())
    reference = qwen2.hf_reference()
    records: list[str] = []
    for gate in (baseline_gate, prefill_gate, decode_gate):
        with pytest.raises(NotOffered, match=r"the runner has no forms\(\)"):
            gate(qwen2, reference)
        with pytest.raises(pytest.skip.Exception, match=r"not offered: the runner has no forms\(\)"):
            suite.judge(lambda kind, _: records.append(kind), lambda gate=gate: gate(qwen2, reference))  # type: ignore[misc]
    assert records == []
    with pytest.raises(NotOffered, match=r"the runner has no performance\(\)"):
        set_up(qwen2, 16)


def test_all_outcomes_are_recorded_and_the_last_decides() -> None:
    records: list[tuple[str, Any]] = []

    def record(kind: str, payload: Any) -> None:
        records.append((kind, payload))

    detail, verdict = (
        Outcome("detail", True, {"a": 1}),
        Outcome.of("verdict", "gate", ["it is wrong"], {"b": 2}),
    )
    with pytest.raises(AssertionError, match=r"gate:\n\s+it is wrong"):
        suite.judge(record, lambda: (detail, verdict))
    assert records == [("detail", {"a": 1}), ("verdict", {"b": 2})]
    suite.judge(record, lambda: Outcome.of("verdict", "gate", [], {}))
