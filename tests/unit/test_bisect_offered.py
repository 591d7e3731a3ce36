"""Bisect of a runner that shows no launches: not offered, never a verdict; the device is not touched."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_npu.features.bisect import SECTION, BisectHooks

from llms.verify import localise
from llms.verify.contract.abilities import NotOffered, needed, offered
from llms.verify.contract.deployment import Deployment
from npu_deploy.bisect import BisectRequest, bisect_model
from npu_deploy.errors import USAGE, DeployError

LACKS = r"bisect is not offered for qwen2: the runner has no launch_probe\(\) \(a Foreign\)"


class Foreign:
    """A runner that fulfils the contract and has no ability beyond it."""

    name = "foreign"

    def prefill(self, prompt_tokens: Any) -> Any:
        raise AssertionError("the device was used")

    decode_step = prefill


class Mute(Foreign):
    """Shows launches, but not what a bisect needs beside them."""

    def launch_probe(self) -> Any:
        raise AssertionError("asked before the other abilities were known")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every deployment gets this runner."""
    monkeypatch.setattr(Deployment, "runner", lambda self, max_seq=0, **options: Foreign())


@pytest.fixture
def deployment(runner: None) -> Deployment:
    return Deployment.from_folder("qwen2")


def test_the_lacking_ability_is_named(deployment: Deployment) -> None:
    with pytest.raises(localise.BisectNotOffered, match=LACKS):
        localise.find(deployment)


def test_every_ability_is_asked_for_first(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deployment, "runner", lambda self, max_seq=0, **options: Mute())
    with pytest.raises(localise.BisectNotOffered, match=r"no device_arithmetic\(\) \(a Mute\)"):
        localise.find(deployment)


@pytest.mark.usefixtures("runner")
def test_the_command_says_so_as_a_wrong_request() -> None:
    with pytest.raises(DeployError, match=LACKS) as refused:
        bisect_model(BisectRequest("qwen2"))
    assert refused.value.exit_code == USAGE


def test_a_failed_gate_shows_it_and_records_nothing(deployment: Deployment) -> None:
    info = SimpleNamespace(phase=6, folder=Path("llms/qwen2"), model="qwen2")
    hooks = BisectHooks({"a::test": info}, nullcontext, pytest.fail)  # type: ignore[dict-item, arg-type]
    item = SimpleNamespace(nodeid="a::test", funcargs={"deployment": deployment})
    report = SimpleNamespace(when="call", failed=True, sections=[])
    hook = hooks.pytest_runtest_makereport(item)  # type: ignore[arg-type]
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(report)  # type: ignore[arg-type]
    ((title, text),) = report.sections
    assert title == SECTION
    assert text.startswith("bisect is not offered for qwen2: the runner has no launch_probe()")


def test_an_ability_may_come_from_the_object_that_builds_the_runner() -> None:
    adapter = SimpleNamespace(build_runner=Mute().prefill)
    assert offered(adapter, "launch_probe") is not None
    assert offered(Foreign(), "launch_probe") is None
    with pytest.raises(NotOffered, match=r"the adapter has no forms\(\)"):
        needed(adapter, "forms")
