"""`make conformance`, second part: runtime, plugin and doctor on the real pyxrt, in the sandbox."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import xrt_sandbox

PYTEST = ["python3", "-m", "pytest", "-p", "no:cacheprovider", "-q"]
INSIDE = "/project/tests/silicon/inside"
PATHS = {"PYTHONPATH": "/project:/project/plugins", "XDG_CACHE_HOME": "/tmp/cache"}


def test_runtime(sandbox: xrt_sandbox.Sandbox, say: list[str]) -> None:
    done = sandbox.run([*PYTEST, f"{INSIDE}/runtime_on_pyxrt.py"], env=PATHS, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    say.append(f"host runtime on pyxrt {sandbox.xrt_version}: {done.stdout.splitlines()[-1]}")
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("mode", "env", "text", "remedy"),
    [
        ("no-device", {}, "pyxrt sees no NPU device", "amdxdna driver is loaded"),
        ("locked", {}, r"the NPU cannot be opened .*Permission denied", "group that owns /dev/accel/accel0"),
        ("device", {"LD_PRELOAD": ""}, "the NPU cannot be opened .*Inappropriate ioctl", "amdxdna driver"),
        ("device", {"XCL_EMULATION_MODE": "x"}, "cannot look for devices", "Unset XCL_EMULATION_MODE"),
    ],
)
def test_select_without_a_usable_device(
    mode: str, env: dict[str, str], text: str, remedy: str, sandbox: xrt_sandbox.Sandbox
) -> None:
    code = "from llms.llama_kernel_builder import driver; driver.select('npu2')"
    done = sandbox.run(["python3", "-c", code], env={**PATHS, **env}, mode=mode)
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(text, last), done.stderr
    assert remedy in last, done.stderr


class Run:
    """One `pytest --npu` of the stand-in model in the sandbox, and what it left."""

    def __init__(
        self, sandbox: xrt_sandbox.Sandbox, out: Path, *args: str, mode: str = "device", **env: str
    ) -> None:
        command = [*PYTEST, "-p", "pytest_npu.plugin", "--npu", "--npu-report-dir", "/out/reports"]
        target = f"{INSIDE}/sum_model/tests/check_sum.py"
        done = sandbox.run([*command, *args, target], env={**PATHS, **env}, out=out, mode=mode, timeout=120)
        self.code = done.returncode
        self.text = done.stdout + done.stderr
        self.out = out

    @property
    def results(self) -> dict[str, Any]:
        """results.json of the run."""
        (path,) = (self.out / "reports" / "sum_model").glob("*/results.json")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def outcomes(self) -> dict[str, str]:
        """Outcome by test."""
        return {test["nodeid"].partition("::")[2]: test["outcome"] for test in self.results["tests"]}


def test_completed_but_uncomputed_is_a_numeric_failure(sandbox: xrt_sandbox.Sandbox, tmp_path: Path) -> None:
    run = Run(sandbox, tmp_path)
    assert run.code == 1, run.text
    assert "1024 of 1024 elements wrong" in run.text
    assert run.outcomes() == {
        "test_sum[ELF]": "failed",
        "test_sum[XCLBIN]": "failed",
        "test_the_run_goes_on": "passed",
    }
    assert {path.name for path in (tmp_path / "reports" / "sum_model").glob("*/*")} >= {
        "report.html",
        "results.json",
    }
    facts = {fact["name"]: fact for fact in run.results["preflight"]}
    assert facts["NPU generation"]["ok"]
    assert facts["XRT"]["value"].startswith("2.25")


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"FX_STATE": "5"}, "kernel 'add' ended in ERT_CMD_STATE_ERROR after"),
        ({"FX_STATE": "8"}, "kernel 'add' ended in ERT_CMD_STATE_TIMEOUT after"),
        ({"FX_DELAY_MS": "-1", "NPU_WAIT_LIMIT_MS": "300"}, "no end within the wait limit of 300 ms"),
        ({"FX_FAIL": "46:22"}, "ended in SUBMISSION REFUSED"),
        ({"FX_FAIL": "40:16"}, "the driver refuses a hardware context"),
        ({"FX_FAIL": "43:12"}, "The NPU cannot be opened|cannot be opened|cannot be allocated"),
    ],
)
def test_faults_end_in_the_documented_errors(
    env: dict[str, str], text: str, sandbox: xrt_sandbox.Sandbox, tmp_path: Path
) -> None:
    run = Run(sandbox, tmp_path, **env)
    assert re.search(text, run.text), run.text
    assert "Fatal Python error" not in run.text
    assert "destructed while" not in run.text
    if "43" in env.get("FX_FAIL", ""):
        assert run.code == 4, run.text
        return
    assert run.code == 1, run.text
    assert run.outcomes()["test_sum[ELF]"] == "failed"
    assert run.outcomes()["test_the_run_goes_on"] == "passed"


@pytest.mark.parametrize("which", ["all", "parent", "child"])
def test_a_killed_run_leaves_no_lock(which: str, sandbox: xrt_sandbox.Sandbox) -> None:
    """kill -9 while a command is in flight: of all processes, of the supervisor, of that with the device."""
    done = sandbox.run(["python3", f"{INSIDE}/kill_a_run.py", which], env=PATHS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["held"], found
    assert found["free"], found
    assert found["seconds"] < 5
    assert found["left"] == 0


DOCTOR = {
    "device": {
        "NPU": "ok",
        "NPU generation": "ok",
        "driver": "ok",
        "access": "ok",
        "pyxrt": "ok",
        "XRT": "ok",
        "device opens": "ok",
        "power mode": "info",
        "lock file": "ok",
    },
    "no-device": {"NPU": "bad", "driver": "bad", "pyxrt": "ok", "XRT": "ok", "device opens": "bad"},
    "locked": {"NPU": "ok", "access": "bad", "memlock limit": "bad", "device opens": "bad"},
}
# Environment, and what "device opens" says then, with its remedy.
REFUSALS = {
    "without the stand-in": ({"LD_PRELOAD": ""}, "err=-25", "another driver than amdxdna"),
    "no memory": ({"FX_FAIL": "43:12"}, "err=-12", "memlock"),
    "emulation": ({"XCL_EMULATION_MODE": "hw_emu"}, "XCL_EMULATION_MODE=hw_emu", "unset XCL_EMULATION_MODE"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_doctor_on_a_device_that_does_not_open(refusal: str, sandbox: xrt_sandbox.Sandbox) -> None:
    env, value, remedy = REFUSALS[refusal]
    done = sandbox.run(
        ["python3", "-m", "pytest_npu.device.preflight", "--json", "--npu"], env={**PATHS, **env}
    )
    assert done.returncode == 4, done.stdout
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}["device opens"]
    assert found["status"] == "bad"
    assert value in found["value"]
    assert remedy in found["remedy"]


@pytest.mark.parametrize("mode", DOCTOR)
def test_doctor(mode: str, sandbox: xrt_sandbox.Sandbox) -> None:
    done = sandbox.run(
        ["python3", "-m", "pytest_npu.device.preflight", "--json", "--npu"], env=PATHS, mode=mode
    )
    report = json.loads(done.stdout)
    found = {finding["name"]: finding["status"] for finding in report["findings"]}
    assert {name: found.get(name) for name in DOCTOR[mode]} == DOCTOR[mode]
    assert (done.returncode, report["silicon"]["usable"]) == ((0, True) if mode == "device" else (4, False))
    assert all(finding["remedy"] for finding in report["findings"] if finding["status"] == "bad")


@pytest.mark.parametrize(
    ("phase", "program"),
    [("1", "gemv_external_k576"), ("3", r"rms_gemv_rope\.q_gemv"), ("6", "rms_gemv_rope")],
)
def test_programs_without_artefacts_are_named(phase: str, program: str, sandbox: xrt_sandbox.Sandbox) -> None:
    command = [*PYTEST, "-p", "pytest_npu.plugin", "--npu", "--npu-report-dir", "/tmp/reports"]
    done = sandbox.run([*command, "-m", f"phase{phase}", "/project/llms/smollm2_135m"], env=PATHS)
    assert done.returncode == 4, done.stdout + done.stderr
    assert re.search(rf"compiled artefacts: smollm2_135m: .* missing in .*{program}", done.stderr)


@pytest.mark.parametrize(
    ("mode", "text"),
    [("no-device", "no usable NPU: pyxrt sees no NPU device"), ("locked", "Permission denied")],
)
def test_no_usable_device_is_exit_code_4(
    mode: str, text: str, sandbox: xrt_sandbox.Sandbox, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    run = Run(sandbox, tmp_path, mode=mode)
    assert run.code == 4, run.text
    assert text in run.text
    assert "Remedy" in run.text
