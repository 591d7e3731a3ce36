"""Names and limits that more than one part of the plugin needs."""

from __future__ import annotations

from typing import Final

#: Version of the event log's lines. A reader refuses a newer one.
EVENT_SCHEMA: Final = 1
#: Version of `results.json`.
RESULTS_SCHEMA: Final = 1

#: The file every hardware command of the mlir-air examples locks. Deliberately not below `$TMPDIR`: two
#: users with different TMPDIR share one NPU.
DEFAULT_LOCK_FILE: Final = "/tmp/mlir-air-npu.lock"
#: Seconds; the limit that the mlir-air examples pass to flock(1).
DEFAULT_LOCK_TIMEOUT_S: Final = 1800.0
LOCK_FILE_ENV: Final = "NPU_LOCK_FILE"
LOCK_TIMEOUT_ENV: Final = "NPU_LOCK_TIMEOUT"

#: Name of the plugin object that takes the collection; registered when a run needs us.
COLLECTION: Final = "npu-collection"
#: Environment variable with the descriptor of the pipe to the supervisor.
FD_ENV: Final = "PYTEST_NPU_SUPERVISOR_FD"
#: Key of an xdist worker's input: its controller was pointed at a model.
EXPECTED_KEY: Final = "npu_expected"

DEFAULT_REPORT_DIR: Final = "reports"
#: Folder name of runs of tests that use the plugin outside of any model folder.
NO_MODEL: Final = "framework"
#: The file that makes a folder a model folder.
ADAPTER_FILE: Final = "verify_adapter.py"
#: The tests that model folders import; its assertions are rewritten as those of a test file.
SUITE: Final = "llms.verify.suite"

TWIN: Final = "twin"
NPU2: Final = "npu2"
#: What reports say of a device that `--npu-fault` has broken on purpose.
FAULT_PLANTED: Final = "FAULT PLANTED"
DEVICE_LABELS: Final = {TWIN: "twin (modelled)", NPU2: "npu2 (measured)"}

#: Options of pytest that print something instead of running tests.
QUESTIONS: Final = (
    "help",
    "version",
    "markers",
    "showfixtures",
    "show_fixtures_per_test",
    "collectonly",
    "cacheshow",
)

DEFAULT_N_TOKENS: Final = 32
DEFAULT_PROMPTS: Final = 2

#: Seconds without any sign of progress of a test phase before the supervisor calls it hung. A cold start
#: (weights, reference, compilation) of the largest model in scope stays well below it.
DEFAULT_HANG_TIMEOUT_S: Final = 900.0
#: The driver's own time-out is about 6.1 s (XRT 2.25.0); a run that took that long was aborted by the driver.
DRIVER_TIMEOUT_S: Final = 6.1
DRIVER_TIMEOUT_TOLERANCE_S: Final = 0.1

PHASES: Final = {
    0: "reference",
    1: "kernels",
    2: "block",
    3: "full model",
    4: "prefill",
    5: "decode",
    6: "finalize",
    7: "audit",
}

FIXTURES: Final = frozenset(
    {
        "npu_device",
        "npu_lock",
        "npu_options",
        "npu_record",
        "npu_benchmark",
        "deployment",
        "hf_reference",
        "model_folder",
        "device_clock",
    }
)
#: A test that requests one of these works on the device.
DEVICE_FIXTURES: Final = FIXTURES - {"model_folder", "npu_options", "npu_record"}
#: Attribute of test reports that carries our fields, also from xdist workers to the controller.
REPORT_FIELD: Final = "npu"
#: A test that requests one of these is a performance test.
PERF_FIXTURE: Final = "npu_benchmark"
#: Warm-up and timed rounds. The twin's clock is deterministic: more rounds would repeat the same number.
ROUNDS: Final = {TWIN: (1, 3), NPU2: (5, 20)}
