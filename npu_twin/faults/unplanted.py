"""Entries of the catalogue without a plant: why, and what stands against them instead."""

from __future__ import annotations

from npu_twin.faults._types import Unplanted

_TIME = "right numbers, only time, and less than the factor of two that a prediction can tell"
_BENCH = "pytest-benchmark's compare over the device clock, `kernel_registry check` for single kernels"
_PROCESS = "a way of working, not a state of the software"

UNPLANTED: tuple[Unplanted, ...] = (
    Unplanted(
        "A9", "cascade GEMV with add at K % 512 != 0",
        "builds and runs, and no block of our models has that kernel: there is no deployment to plant it in",
        "rule V9 of npu_twin.constraints; phase 1 judges every kernel that a block uses",
    ),
    Unplanted("A24", "array half idle", _TIME, "phase 1 records cores and utilisation of every kernel"),
    Unplanted(
        "A25", "elements beyond atol although the kernel is in its tier",
        "no fault: the exact arithmetic has it", "phase 1 reports `in tier, n elements over`",
    ),
    Unplanted("B11", "no gain from skipping masked blocks", _TIME, "rule F17: the timing model has it"),
    Unplanted(
        "C10", "buffer above 4 GiB, addresses wrap",
        "builds and runs: a plant would have to hold such a buffer, more memory than a test may take",
        "rule B14 of npu_twin.constraints, tested in tests/twin/test_constraints_programs.py",
    ),
    Unplanted("C12", "contexts of two kinds alternate", _TIME, "rule R2: the timing model has it"),
    Unplanted("C13", "first kernel after an idle time", _TIME, "rule D9: the timing model has it"),
    Unplanted(
        "C14", "two locks on one file wait for each other", "needs two processes, not a deployment",
        "tests/plugin/test_plugin_lock.py",
    ),
    Unplanted(
        "C15", "two processes on the device without a lock", "needs two processes, not a deployment",
        "tests/plugin/test_plugin_lock.py; the rung `determinism`",
    ),
    Unplanted(
        "C19", "artefacts of two builds mixed in one folder",
        "the store writes each under a key of its content",
        "`stale_artefact` plants the outcome; tests/unit/test_toolkit_cache.py",
    ),
    Unplanted(
        "E12", "base model gated with instruct prompts", "a legal choice of the user",
        "reports show the prompt style",
    ),
    Unplanted(
        "E34", "the reference does not load", "an absent file, not a bug of the software",
        "tests/unit/test_checkpoints_resolve.py: the error names file and remedy",
    ),
    Unplanted(
        "E35", "optimisation kept although its gate got worse, or speed by less exact kernels", _PROCESS,
        "phases 4 and 5 gate every form again; tests/unit/test_phase45_gate.py plants both verdicts",
    ),
    Unplanted(
        "E36", "change for one model breaks another", _PROCESS, "CI runs all models; every shared fault here"
        " is planted in each of them",
    ),
)  # fmt: skip
