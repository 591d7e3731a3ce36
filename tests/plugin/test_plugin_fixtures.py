"""Fixtures: device, deployment, records."""

from __future__ import annotations


def test_deployment_belongs_to_the_folder_of_the_test_and_is_opened_once(suite):
    text = """
def test_which(deployment, hf_reference, opened_deployments):
    assert deployment.folder.name == __file__.split(os.sep)[-3]
    assert hf_reference == "the reference"
    assert opened_deployments.count(deployment.folder.name) == 1
"""
    suite.model("one", a=text, b=text)
    suite.model("two", a=text)
    suite.run().assert_outcomes(passed=3)
    deployment = suite.results("two")["deployment"]
    assert deployment["checkpoint"]["label"] == "Tiny, random weights"
    assert deployment["config"] == {"n_layers": 2}


def test_deployment_outside_of_a_model_folder_says_why_not(suite):
    suite.pytester.makepyfile(test_x="def test_x(deployment): pass")
    result = suite.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*needs a test below a model folder*"])


def test_unknown_model_variant_is_one_clear_line(suite):
    """The default opener: what the project's own Deployment refuses ends the test without a traceback."""
    conftest = suite.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("def pytest_npu_open_deployment", "def unused"))
    suite.model(a="def test_x(deployment): pass")
    result = suite.spawn()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["tiny: *verify_adapter.py does not fulfil the adapter contract*"])
    assert "Traceback" not in result.stdout.str()


def test_device_clock_and_lock_on_the_twin(suite):
    suite.model(
        a="""
def test_x(npu_device, device_clock, npu_lock):
    assert npu_device.label == "twin (modelled)"
    assert device_clock is npu_device.clock
    with npu_lock, npu_lock:
        assert npu_lock.held
        device_clock.seconds += 2.5
    assert not npu_lock.held and npu_lock.waited_s == 0
"""
    )
    suite.run("--npu-lock=never-created").assert_outcomes(passed=1)
    assert not (suite.path / "never-created").exists()
    assert suite.results()["tests"][0]["device_s"] == 2.5


def test_records_reach_the_log_at_once_and_keep_non_finite_numbers_visible(suite):
    suite.model(
        a="""
import json, pathlib
def test_x(npu_record):
    npu_record("mine", {"a": float("nan"), "b": [float("-inf"), 1], "c": (1, 2), "d": pathlib.Path("x")})
    log = next(pathlib.Path("reports/tiny").glob("*/events.jsonl")).read_text()
    assert '"kind": "mine"' in log
"""
    )
    suite.run().assert_outcomes(passed=1)
    record = suite.results()["records"][0]
    assert record["payload"] == {"a": "nan", "b": ["-inf", 1], "c": [1, 2], "d": "x"}
    assert record["nodeid"].endswith("::test_x")


def test_numpy_values_become_plain_numbers(suite):
    suite.model(
        a="""
import numpy as np
def test_x(npu_record):
    one = {"scalar": np.float32(0.5), "row": np.arange(3)}
    npu_record("mine", {**one, "flag": np.bool_(True), "nan": np.float64("nan")})
"""
    )
    suite.spawn().assert_outcomes(passed=1)
    assert suite.results()["records"][0]["payload"] == {
        "scalar": 0.5,
        "row": [0, 1, 2],
        "flag": True,
        "nan": "nan",
    }


def test_payload_that_json_cannot_carry_is_an_error_that_names_the_entry(suite):
    suite.model(a="def test_x(npu_record): npu_record('mine', {'rows': [1, {'x': object()}]})")
    result = suite.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*RecordError: mine.rows[[]1].x is a object, which JSON cannot carry*"])


def test_tests_outside_of_models_that_use_the_plugin_are_reported_together(suite):
    suite.pytester.makepyfile(test_x="def test_x(npu_record): npu_record('mine', 1)\ndef test_other(): pass")
    suite.run().assert_outcomes(passed=2)
    assert suite.outcomes("framework") == {"test_x": "passed"}


def test_poisoned_device_fails_its_later_tests_with_the_first_cause(suite):
    from pytest_npu import DevicePoisoned

    assert "the device is not used any more in this run: hang in test_x" in str(
        DevicePoisoned("hang in test_x")
    )


def test_export_list_is_complete():
    import pytest_npu
    from pytest_npu.core import exceptions

    errors = {
        name
        for name, value in vars(exceptions).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert set(pytest_npu.__all__) == errors
