"""Test files of a model import the shared suite: assertions are rewritten, fixtures find the model."""

from __future__ import annotations

SUITE = """
from llms.verify import suite
from llms.verify.suite import test_independent_audit
from types import SimpleNamespace

def test_assertions_are_rewritten():
    assert type(suite.__loader__).__name__ == "AssertionRewritingHook"

@pytest.fixture(autouse=True)
def audit(monkeypatch):
    def told(folder, options):
        return SimpleNamespace(ok=True, payload={"folder": folder.name}, table={}, message="")
    monkeypatch.setattr(suite.phase7, "for_options", told)

@pytest.mark.phase7
def test_own(model_folder):
    assert (model_folder / "verify_adapter.py").is_file()
"""


def test_the_suite_is_rewritten_and_its_tests_belong_to_the_model(suite):
    suite.model("one", audit=SUITE)
    suite.model("two", audit=SUITE)
    result = suite.spawn("-q", "llms")
    result.assert_outcomes(passed=6)
    for model in ("one", "two"):
        (audit,) = [event for event in suite.events(model) if event.get("kind") == "audit"]
        assert audit["payload"] == {"folder": model}


def test_a_model_folder_is_needed(suite):
    suite.pytester.makepyfile("def test_alone(model_folder): pass")
    result = suite.spawn()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*'model_folder' needs a test below a model folder*"])
