"""Command line options and the frozen value they become."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from .constants import (
    DEFAULT_HANG_TIMEOUT_S,
    DEFAULT_LOCK_FILE,
    DEFAULT_LOCK_TIMEOUT_S,
    DEFAULT_N_TOKENS,
    DEFAULT_PROMPTS,
    DEFAULT_REPORT_DIR,
    LOCK_FILE_ENV,
    LOCK_TIMEOUT_ENV,
    NPU2,
    TWIN,
)


@dataclass(frozen=True, eq=False)
class NpuOptions:
    """What the user asked for. Paths are absolute, times in seconds.

    `prompts` is None for all prompts of the set; `model` is None for the adapter's default.
    """

    npu: bool = False
    lock_file: Path = Path(DEFAULT_LOCK_FILE)
    lock_timeout: float = DEFAULT_LOCK_TIMEOUT_S
    report_dir: Path = Path(DEFAULT_REPORT_DIR)
    run_id: str | None = None
    checkpoint: Path | None = None
    model: str | None = None
    prompts: int | None = DEFAULT_PROMPTS
    n_tokens: int = DEFAULT_N_TOKENS
    phase_order: bool = True
    use_cache: bool = True
    supervise: bool = False
    hang_timeout: float = DEFAULT_HANG_TIMEOUT_S
    #: File of the timeline.
    trace: Path | None = None
    #: Folders of deployments to adopt.
    adopt: tuple[Path, ...] = ()
    #: Name of a fault of the catalogue to plant.
    fault: str | None = None
    #: After a failed gate, name the first kernel that is wrong.
    bisect: bool = False
    #: True when any option of the plugin was given.
    asked: bool = False

    @property
    def device(self) -> str:
        """Name of the driver: `npu2` or `twin`."""
        return NPU2 if self.npu else TWIN

    @classmethod
    def from_config(cls, config: pytest.Config) -> NpuOptions:
        """Read the options of one pytest run. Raises pytest.UsageError for a value that makes no sense."""
        get = config.getoption
        here = Path(config.invocation_params.dir)
        lock = get("npu_lock") or os.environ.get(LOCK_FILE_ENV) or DEFAULT_LOCK_FILE
        timeout = get("npu_lock_timeout")
        if timeout is None:
            timeout = _timeout_from_env()
        report_dir = get("npu_report_dir")
        checkpoint = get("checkpoint")
        if checkpoint and not (here / Path(checkpoint).expanduser()).exists():
            raise pytest.UsageError(
                f"--checkpoint: there is no {here / Path(checkpoint).expanduser()}; "
                "give a Hugging Face folder or a GGUF file"
            )
        trace = get("npu_trace")
        if trace is not None and (not trace or (here / trace).is_dir()):
            raise pytest.UsageError(f"--npu-trace '{trace}' is no file name, e.g. trace.json")
        run_id = get("npu_run_id")
        if run_id is not None and (not run_id or "/" in run_id or run_id.startswith(".")):
            raise pytest.UsageError(f"--npu-run-id '{run_id}' is no plain folder name")
        return cls(
            npu=get("npu"),
            lock_file=here / lock,
            lock_timeout=timeout,
            # an adopted folder makes pytest take its repository as the root folder; reports do not go there
            report_dir=(here / report_dir)
            if report_dir
            else (here if get("npu_adopt") else config.rootpath) / DEFAULT_REPORT_DIR,
            run_id=run_id,
            checkpoint=(here / Path(checkpoint).expanduser()) if checkpoint else None,
            model=get("npu_model"),
            prompts=None if get("npu_prompts") == "all" else get("npu_prompts"),
            n_tokens=get("npu_n_tokens"),
            phase_order=not get("no_phase_order"),
            use_cache=not get("npu_no_cache"),
            supervise=bool(get("npu_supervise") if get("npu_supervise") is not None else get("npu")),
            hang_timeout=get("npu_hang_timeout"),
            trace=(here / trace) if trace else None,
            adopt=tuple(here / Path(path).expanduser() for path in get("npu_adopt") or ()),
            fault=get("npu_fault"),
            bisect=get("npu_bisect"),
            asked=any(get(name) != default for name, default in _DEFAULTS.items()),
        )


def _timeout_from_env() -> float:
    text = os.environ.get(LOCK_TIMEOUT_ENV)
    if not text:
        return DEFAULT_LOCK_TIMEOUT_S
    try:
        return _seconds(text)
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"environment variable {LOCK_TIMEOUT_ENV}: {error}") from error


def _seconds(text: str) -> float:
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


_OPTIONS: tuple[tuple[str, dict[str, object]], ...] = (
    (
        "--npu",
        {
            "action": "store_true",
            "help": "run on the NPU of this machine. Without a usable one pytest ends with exit code 4 and "
            "says what is missing. Without this option the digital twin is used.",
        },
    ),
    (
        "--npu-lock",
        {
            "metavar": "FILE",
            "help": f"file of the machine-wide NPU lock, flock(1) compatible (default: ${LOCK_FILE_ENV} or "
            f"{DEFAULT_LOCK_FILE})",
        },
    ),
    (
        "--npu-lock-timeout",
        {
            "metavar": "SECONDS",
            "type": _seconds,
            "help": f"longest wait for the NPU lock (default: ${LOCK_TIMEOUT_ENV} or "
            f"{DEFAULT_LOCK_TIMEOUT_S:.0f})",
        },
    ),
    (
        "--npu-report-dir",
        {
            "metavar": "DIR",
            "help": f"where reports go: DIR/<model>/<run>/ "
            f"(default: {DEFAULT_REPORT_DIR} in pytest's root folder)",
        },
    ),
    (
        "--npu-trace",
        {
            "metavar": "FILE",
            "help": "write the timeline of ELF runs, launches, buffer transfers, host operations and waits, "
            "on the device clock, as a Chrome trace for ui.perfetto.dev (one file per pytest-xdist worker)",
        },
    ),
    (
        "--npu-run-id",
        {"metavar": "NAME", "help": "name of the run's folder (default: date and time)"},
    ),
    (
        "--checkpoint",
        {
            "metavar": "PATH",
            "help": "weights to use: a Hugging Face folder or a GGUF file (default: the first of local "
            "HF cache, HF hub, packaged and tiny checkpoint that exists)",
        },
    ),
    (
        "--npu-model",
        {
            "metavar": "NAME",
            "help": "variant of the model: a key of its MODEL_CHOICES (usually base or instruct) or a "
            "checkpoint id (default: the adapter's)",
        },
    ),
    (
        "--npu-prompts",
        {
            "metavar": "N",
            "type": _count_or_all,
            "default": DEFAULT_PROMPTS,
            "help": "number of prompts of the token-set gate, or 'all' (default: %(default)s)",
        },
    ),
    (
        "--npu-n-tokens",
        {
            "metavar": "N",
            "type": _positive,
            "default": DEFAULT_N_TOKENS,
            "help": "tokens generated per prompt by the gates (default: %(default)s)",
        },
    ),
    (
        "--npu-adopt",
        {
            "metavar": "PATH",
            "action": "append",
            "help": "judge a deployment that exists already: a folder with a verify_adapter.py as the LLM "
            "examples of mlir-air have it, or a folder of such folders; each gate runs in a process of its "
            "own. May be given several times",
        },
    ),
    (
        "--npu-fault",
        {
            "metavar": "NAME",
            "help": "plant a fault in the twin or in the deployments for the whole run, to see that the "
            "gates fail; `python -m npu_twin.faults list` shows them",
        },
    ),
    (
        "--npu-bisect",
        {
            "action": "store_true",
            "help": "after a failed gate of phase 2 to 6, compare every kernel with its fp32 reference and "
            "name the first one, or the host operation or buffer, that is wrong",
        },
    ),
    (
        "--no-phase-order",
        {
            "action": "store_true",
            "help": "run later phases of a model although an earlier one failed, in collection order",
        },
    ),
    (
        "--npu-no-cache",
        {"action": "store_true", "help": "compute the reference anew instead of taking it from the cache"},
    ),
    (
        "--npu-supervise",
        {
            "action": argparse.BooleanOptionalAction,
            "default": None,
            "help": "run the tests in a child process under a supervisor that survives hangs and crashes "
            "(default: with --npu)",
        },
    ),
    (
        "--npu-hang-timeout",
        {
            "metavar": "SECONDS",
            "type": _seconds,
            "default": DEFAULT_HANG_TIMEOUT_S,
            "help": "under a supervisor: longest time of one test phase before it counts as hung, 0 for no "
            "limit (default: %(default)s; a test overrides it with @pytest.mark.npu_hang_timeout(SECONDS))",
        },
    ),
)


def _default(settings: dict[str, object]) -> object:
    return settings.get("default", False if settings.get("action") == "store_true" else None)


#: What an option is when nobody gave it, by the name that pytest knows it under.
_DEFAULTS = {flag.lstrip("-").replace("-", "_"): _default(settings) for flag, settings in _OPTIONS}


def add_options(parser: pytest.Parser) -> None:
    """Register the options of the plugin in their own group of `pytest --help`."""
    group = parser.getgroup("npu", "LLM deployments on an AMD NPU (pytest-npu)")
    for flag, settings in _OPTIONS:
        group.addoption(flag, **settings)
