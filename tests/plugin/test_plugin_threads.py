"""OpenMP threads that wait for work sleep, and leave the cores to others."""

from __future__ import annotations

import os
import sys

import pytest

#: Runs while the module is imported, as `import torch` at its top would.
SEEN = """
SEEN = os.environ.get("OMP_WAIT_POLICY")
def test_x(npu_record): npu_record("policy", SEEN)
"""


def policy(suite) -> str | None:
    return next(record["payload"] for record in suite.results()["records"] if record["kind"] == "policy")


@pytest.mark.parametrize(("args", "plugins"), [((), ""), (("-n", "1"), "xdist"), (("--npu-supervise",), "")])
def test_idle_threads_sleep_before_the_first_test_module_of_a_model_is_imported(
    suite, monkeypatch, args, plugins
):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    suite.model(a=SEEN)
    suite.spawn(*args, plugins=plugins).assert_outcomes(passed=1)
    assert policy(suite) == "PASSIVE"


def test_policy_of_the_user_is_kept(suite, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    suite.model(a=SEEN)
    suite.spawn().assert_outcomes(passed=1)
    assert policy(suite) == "ACTIVE"


def test_environment_is_as_before_when_the_run_is_over(suite, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    suite.model(a=SEEN)
    suite.run().assert_outcomes(passed=1)
    assert policy(suite) == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in os.environ


def test_nothing_is_set_once_torch_is_there(suite, monkeypatch):
    """It would change nothing in this process, and only mislead."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setitem(sys.modules, "torch", sys)
    suite.model(a=SEEN)
    suite.run().assert_outcomes(passed=1)
    assert policy(suite) is None
