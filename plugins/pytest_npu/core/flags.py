"""The command line options: all that a run without a test of ours needs to know of them."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from pytest_npu.core.constants import (
    DEFAULT_HANG_TIMEOUT_S,
    DEFAULT_LOCK_FILE,
    DEFAULT_LOCK_TIMEOUT_S,
    DEFAULT_N_TOKENS,
    DEFAULT_PROMPTS,
    DEFAULT_REPORT_DIR,
    LOCK_FILE_ENV,
    LOCK_TIMEOUT_ENV,
)


def seconds(text: str) -> float:
    """A finite number of seconds from 0 up; raises argparse.ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of seconds") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a finite number of seconds from 0 up")
    return value


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 1 up")
    return int(text)


def _count_or_all(text: str) -> int | str:
    return text if text == "all" else _positive(text)


_OPTIONS: dict[str, dict[str, Any]] = {
    "--npu": {
        "action": "store_true",
        "help": "run on the NPU of this machine. Without a usable one pytest ends with exit code 4 and "
        "says what is missing. Without this option the digital twin is used.",
    },
    "--npu-lock": {
        "metavar": "FILE",
        "help": f"file of the machine-wide NPU lock, flock(1) compatible (default: ${LOCK_FILE_ENV} or "
        f"{DEFAULT_LOCK_FILE})",
    },
    "--npu-lock-timeout": {
        "metavar": "SECONDS",
        "type": seconds,
        "help": f"longest wait for the NPU lock (default: ${LOCK_TIMEOUT_ENV} or "
        f"{DEFAULT_LOCK_TIMEOUT_S:.0f})",
    },
    "--npu-report-dir": {
        "metavar": "DIR",
        "help": f"where reports go: DIR/<model>/<run>/ "
        f"(default: {DEFAULT_REPORT_DIR} in pytest's root folder)",
    },
    "--npu-trace": {
        "metavar": "FILE",
        "help": "write the timeline of ELF runs, launches, buffer transfers, host operations and waits, "
        "on the device clock, as a Chrome trace for ui.perfetto.dev (one file per pytest-xdist worker)",
    },
    "--npu-no-ledger": {
        "action": "store_true",
        "help": "keep the verdicts of this run out of the models' gate ledgers (`npu-deploy status`)",
    },
    "--npu-run-id": {"metavar": "NAME", "help": "name of the run's folder (default: date and time)"},
    "--checkpoint": {
        "metavar": "PATH",
        "help": "weights to use: a Hugging Face folder or a GGUF file (default: the first of local "
        "HF cache, HF hub, packaged and tiny checkpoint that exists)",
    },
    "--npu-model": {
        "metavar": "NAME",
        "help": "variant of the model: a key of its MODEL_CHOICES (usually base or instruct) or a "
        "checkpoint id (default: the adapter's)",
    },
    "--npu-prompts": {
        "metavar": "N",
        "type": _count_or_all,
        "default": DEFAULT_PROMPTS,
        "help": "number of prompts of the token-set gate, or 'all' (default: %(default)s)",
    },
    "--npu-n-tokens": {
        "metavar": "N",
        "type": _positive,
        "default": DEFAULT_N_TOKENS,
        "help": "tokens generated per prompt by the gates (default: %(default)s)",
    },
    "--npu-adopt": {
        "metavar": "PATH",
        "action": "append",
        "help": "judge a deployment that exists already: a folder with a verify_adapter.py as the LLM "
        "examples of mlir-air have it, or a folder of such folders; each gate runs in a process of its "
        "own. May be given several times",
    },
    "--npu-fault": {
        "metavar": "NAME",
        "help": "plant a fault in the twin or in the deployments for the whole run, to see that the "
        "gates fail; `python -m npu_twin.faults list` shows them",
    },
    "--npu-bisect": {
        "action": "store_true",
        "help": "after a failed gate of phase 2 to 6, compare every kernel with its fp32 reference and "
        "name the first one, or the host operation or buffer, that is wrong",
    },
    "--no-phase-order": {
        "action": "store_true",
        "help": "run later phases of a model although an earlier one failed, in collection order",
    },
    "--npu-no-cache": {
        "action": "store_true",
        "help": "compute the reference anew instead of taking it from the cache",
    },
    "--npu-supervise": {
        "action": argparse.BooleanOptionalAction,
        "default": None,
        "help": "run the tests in a child process under a supervisor that survives hangs and crashes "
        "(default: with --npu)",
    },
    "--npu-hang-timeout": {
        "metavar": "SECONDS",
        "type": seconds,
        "default": DEFAULT_HANG_TIMEOUT_S,
        "help": "under a supervisor: longest time of one test phase before it counts as hung, 0 for no "
        "limit (default: %(default)s; a test overrides it with @pytest.mark.npu_hang_timeout(SECONDS))",
    },
}


#: What an option is when nobody gave it, by the name that pytest knows it under.
_DEFAULTS = {
    flag.lstrip("-").replace("-", "_"): settings.get(
        "default", False if settings.get("action") == "store_true" else None
    )
    for flag, settings in _OPTIONS.items()
}


def add_options(parser: pytest.Parser) -> None:
    """Register the options of the plugin in their own group of `pytest --help`."""
    group = parser.getgroup("npu", "LLM deployments on an AMD NPU (pytest-npu)")
    for flag, settings in _OPTIONS.items():
        group.addoption(flag, **settings)


def any_given(config: pytest.Config) -> bool:
    """True when an option of ours is on the command line or in the ini file."""
    return any(config.getoption(name) != default for name, default in _DEFAULTS.items())
