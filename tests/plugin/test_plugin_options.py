"""Each option does what its help says; senseless values are usage errors."""

from __future__ import annotations

import json

import pytest

SHOW = """
import json, pathlib
@pytest.mark.phase1
def test_show(npu_options, npu_record):
    npu_record("options", {"prompts": npu_options.prompts, "n_tokens": npu_options.n_tokens,
        "model": npu_options.model, "cache": npu_options.use_cache, "checkpoint": npu_options.checkpoint,
        "lock": npu_options.lock_file, "timeout": npu_options.lock_timeout})
"""
USAGE_ERROR = 4


def shown(suite) -> dict:
    return next(e["payload"] for e in suite.events() if e["event"] == "record")


def test_defaults(suite):
    suite.model(a=SHOW)
    suite.run().assert_outcomes(passed=1)
    expected = {"prompts": 2, "n_tokens": 32, "model": None, "cache": True, "checkpoint": None}
    assert shown(suite) == {**expected, "lock": "/tmp/mlir-air-npu.lock", "timeout": 1800.0}


def test_values_reach_the_tests(suite, monkeypatch):
    suite.model(a=SHOW)
    (suite.path / "weights").mkdir()
    monkeypatch.setenv("NPU_LOCK_FILE", "other.lock")
    monkeypatch.setenv("NPU_LOCK_TIMEOUT", "7.5")
    args = [
        "--npu-prompts=all",
        "--npu-n-tokens=5",
        "--npu-model=base",
        "--npu-no-cache",
        "--checkpoint=weights",
    ]
    suite.run(*args).assert_outcomes(passed=1)
    assert shown(suite) == {
        "prompts": None,
        "n_tokens": 5,
        "model": "base",
        "cache": False,
        "checkpoint": str(suite.path / "weights"),
        "lock": str(suite.path / "other.lock"),
        "timeout": 7.5,
    }


def test_options_win_over_the_environment(suite, monkeypatch):
    suite.model(a=SHOW)
    monkeypatch.setenv("NPU_LOCK_FILE", "other.lock")
    monkeypatch.setenv("NPU_LOCK_TIMEOUT", "7.5")
    suite.run("--npu-lock=mine.lock", "--npu-lock-timeout=2").assert_outcomes(passed=1)
    assert (shown(suite)["lock"], shown(suite)["timeout"]) == (str(suite.path / "mine.lock"), 2.0)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--npu-prompts=0"], "'0' is no whole number from 1 up"),
        (["--npu-prompts=some"], "'some' is no whole number from 1 up"),
        (["--npu-n-tokens=-3"], "'-3' is no whole number"),
        (["--npu-lock-timeout=soon"], "'soon' is no number of seconds"),
        (["--npu-lock-timeout=-1"], "not a finite number of seconds"),
        (["--npu-run-id=a/b"], "no plain folder name"),
        (["--checkpoint=missing"], "give a Hugging Face folder or a GGUF file"),
    ],
)
def test_senseless_values_are_usage_errors(suite, args, text):
    result = suite.run(*args)
    assert result.ret == USAGE_ERROR
    assert text in result.stderr.str()


def test_senseless_environment_is_a_usage_error_that_names_it(suite, monkeypatch):
    monkeypatch.setenv("NPU_LOCK_TIMEOUT", "soon")
    assert suite.run().ret == 5  # no test of ours, none of our business
    suite.model(a="def test_one(): pass")
    result = suite.run()
    assert result.ret == USAGE_ERROR
    assert "NPU_LOCK_TIMEOUT" in result.stderr.str()


def test_npu_without_a_device_is_exit_4_with_reason_and_remedy(suite):
    suite.model(a=SHOW)
    result = suite.spawn("--npu")
    assert result.ret == USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--npu: no usable NPU: pyxrt cannot be imported.", "*Remedy: Install XRT.*"]
    )
    assert "skipped" not in result.stdout.str()
    assert not suite.runs()


def test_npu_without_a_device_is_exit_4_even_when_nothing_is_selected(suite):
    assert suite.run("--npu", "--no-npu-supervise", "-k", "nothing").ret == USAGE_ERROR


def test_npu_still_answers_questions(suite):
    assert suite.run("--npu", "--markers").ret == 0


def test_a_twin_never_stands_in_for_silicon(suite, monkeypatch):
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    conftest = suite.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("return Device(name)", 'return Device("twin")'))
    suite.model(a=SHOW)
    result = suite.run("--npu", "--no-npu-supervise")
    assert result.ret == USAGE_ERROR
    assert "'npu2' was asked for but 'twin' was opened" in result.stderr.str()


def test_preflight_that_is_known_to_be_bad_ends_the_run_with_the_remedy(suite, monkeypatch):
    monkeypatch.setenv("STAND_IN_SILICON", "1")
    conftest = suite.path / "conftest.py"
    conftest.write_text(
        conftest.read_text()
        + """
def pytest_npu_preflight():
    return [{"name": "memlock limit", "value": "8192 KiB", "ok": False, "remedy": "raise it"},
            {"name": "driver", "value": "amdxdna 1", "ok": True, "remedy": ""}]
"""
    )
    suite.model(a=SHOW)
    result = suite.run("--npu", "--no-npu-supervise")
    assert result.ret == USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*not ready for device work*", "*memlock limit: 8192 KiB. Remedy: raise it*"]
    )
    suite.run().assert_outcomes(passed=1)  # on the twin it is information
    assert any(fact["name"] == "memlock limit" for fact in suite.results()["preflight"])


def test_report_dir_and_run_id(suite):
    suite.model(a=SHOW)
    suite.run("--npu-report-dir=out", "--npu-run-id=nightly").assert_outcomes(passed=1)
    results = json.loads((suite.path / "out" / "tiny" / "nightly" / "results.json").read_text())
    assert (results["run"], results["verdict"]) == ("nightly", "PASS")
    assert not (suite.path / "reports").exists()


def test_same_run_id_twice_does_not_collide(suite):
    suite.model(a=SHOW)
    for _ in range(3):
        suite.run("--npu-run-id=nightly").assert_outcomes(passed=1)
    assert sorted(path.name for path in suite.runs()) == ["nightly", "nightly-2", "nightly-3"]


def test_header_names_device_checkpoint_and_versions_when_it_takes_part(suite):
    suite.model(a=SHOW)
    for args in ([], ["--npu-prompts=1"]):
        result = suite.run(*args)
        lines = [line for line in result.outlines if line.startswith("npu: ")]
        assert lines[0].startswith("npu: device twin (modelled)")
        assert lines[1].startswith("npu: checkpoint the model's first available; variant default")
        assert "pytest-npu 0.1.0" in lines[2]
        assert len(lines) == 4
    assert not [line for line in suite.run("-q").outlines if line.startswith("npu: ")]
