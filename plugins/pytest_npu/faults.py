"""`--npu-fault`: a whole run with one fault of the catalogue planted, to see what the gates say of it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from .options import NpuOptions


def configure(config: pytest.Config, options: NpuOptions) -> None:
    """Plant the fault that was asked for until the end of the run; raises pytest.UsageError."""
    if options.fault is None:
        return
    if options.npu:
        raise pytest.UsageError("--npu-fault plants faults in the digital twin: leave out --npu")
    try:
        from npu_twin import faults
    except ImportError as error:
        raise pytest.UsageError(f"--npu-fault needs the digital twin, npu_twin: {error}") from error
    try:
        fault = faults.find(options.fault)
    except KeyError:
        known = "\n  ".join(faults.names())
        raise pytest.UsageError(f"--npu-fault: no fault '{options.fault}'; known:\n  {known}") from None
    planted = ExitStack()
    config.add_cleanup(planted.close)
    planted.enter_context(fault.plant())


def header_line(options: NpuOptions) -> str:
    """What the session header says of it."""
    from npu_twin import faults

    fault = faults.find(options.fault or "")
    where = "" if fault.where == "every model" else f"; applies to models with {fault.where}"
    return f"npu: FAULT PLANTED: {fault.name}, {fault.what}; to be caught in {fault.expected}{where}"
