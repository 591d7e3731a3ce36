"""The one exception of the deployment commands, their exit codes, and the environment they change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

OK: Final = 0
GATE_FAILED: Final = 1
USAGE: Final = 2
OUT_OF_SCOPE: Final = 3
NO_NPU: Final = 4
NOTHING_RAN: Final = 5
BAD_CHECKPOINT: Final = 6
PRECONDITION: Final = 7
INTERRUPTED: Final = 130


class DeployError(Exception):
    """A command cannot go on. The text is one sentence and the remedy; `exit_code` is what the shell gets."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set a variable of the process environment for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def ledger_errors() -> Iterator[None]:
    """Turn errors of the gate ledger into errors of a command."""
    from pytest_npu.core.exceptions import LedgerError, NoCheckpoint

    try:
        yield
    except LedgerError as error:
        raise DeployError(
            str(error), BAD_CHECKPOINT if isinstance(error, NoCheckpoint) else PRECONDITION
        ) from error
