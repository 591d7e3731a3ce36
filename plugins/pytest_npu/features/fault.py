"""`--npu-fault`: a whole run with one fault of the catalogue planted, to see what the gates say of it."""

from __future__ import annotations

from contextlib import ExitStack
from difflib import get_close_matches

import pytest

from pytest_npu.core.constants import FAULT_PLANTED
from pytest_npu.core.options import NpuOptions


def configure(config: pytest.Config, options: NpuOptions, name: str) -> None:
    """Plant the fault `name` until the end of the run; raises pytest.UsageError."""
    if options.npu:
        raise pytest.UsageError("--npu-fault plants faults in the digital twin: leave out --npu")
    try:
        from npu_twin import faults
    except ImportError as error:
        raise pytest.UsageError(f"--npu-fault needs the digital twin, npu_twin: {error}") from error
    try:
        fault = faults.find(name)
    except KeyError:
        close = get_close_matches(name, faults.names(), cutoff=0.5)
        meant = f"; did you mean {' or '.join(close)}?" if close else ""
        raise pytest.UsageError(
            f"--npu-fault: no fault '{name}'{meant}; all: python -m npu_twin.faults list"
        ) from None
    except LookupError as error:
        raise pytest.UsageError(f"--npu-fault: {error}") from error
    planted = ExitStack()
    config.add_cleanup(planted.close)
    planted.enter_context(fault.plant())


def header_line(name: str) -> str:
    """What the session header says of it."""
    from npu_twin import faults

    fault = faults.find(name)
    where = "" if fault.where == "every model" else f"; applies to models with {fault.where}"
    return f"npu: {FAULT_PLANTED}: {fault.name}, {fault.what}; to be caught in {fault.expected}{where}"
