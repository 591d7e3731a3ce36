"""The frozen value that the command line options become."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

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
    NPU2,
    TWIN,
)
from pytest_npu.core.flags import any_given, seconds


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
        checkpoint = here / Path(get("checkpoint")).expanduser() if get("checkpoint") else None
        if checkpoint is not None and not checkpoint.exists():
            raise pytest.UsageError(
                f"--checkpoint: there is no {checkpoint}; give a Hugging Face folder or a GGUF file"
            )
        trace = get("npu_trace")
        if trace is not None and (not trace or (here / trace).is_dir()):
            raise pytest.UsageError(f"--npu-trace '{trace}' is no file name, e.g. trace.json")
        run_id = get("npu_run_id")
        if run_id is not None and (not run_id or "/" in run_id or run_id.startswith(".")):
            raise pytest.UsageError(f"--npu-run-id '{run_id}' is no plain folder name")
        timeout, supervise = get("npu_lock_timeout"), get("npu_supervise")
        # an adopted folder makes pytest take its repository as the root folder; reports do not go there
        default_reports = (here if get("npu_adopt") else config.rootpath) / DEFAULT_REPORT_DIR
        return cls(
            npu=get("npu"),
            lock_file=here / (get("npu_lock") or os.environ.get(LOCK_FILE_ENV) or DEFAULT_LOCK_FILE),
            lock_timeout=_timeout_from_env() if timeout is None else timeout,
            report_dir=here / get("npu_report_dir") if get("npu_report_dir") else default_reports,
            run_id=run_id,
            checkpoint=checkpoint,
            model=get("npu_model"),
            prompts=None if get("npu_prompts") == "all" else get("npu_prompts"),
            n_tokens=get("npu_n_tokens"),
            phase_order=not get("no_phase_order"),
            use_cache=not get("npu_no_cache"),
            supervise=bool(get("npu") if supervise is None else supervise),
            hang_timeout=get("npu_hang_timeout"),
            trace=(here / trace) if trace else None,
            adopt=tuple(here / Path(path).expanduser() for path in get("npu_adopt") or ()),
            fault=get("npu_fault"),
            bisect=get("npu_bisect"),
            asked=any_given(config),
        )


def _timeout_from_env() -> float:
    text = os.environ.get(LOCK_TIMEOUT_ENV)
    if not text:
        return DEFAULT_LOCK_TIMEOUT_S
    try:
        return seconds(text)
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"environment variable {LOCK_TIMEOUT_ENV}: {error}") from error
