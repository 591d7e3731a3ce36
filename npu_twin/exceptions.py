"""Exceptions of the twin, outside the driver seam.

The seam itself (``npu_twin.pyxrt``) raises builtin exceptions only, as pyxrt does; the classes here belong to
the parts above and below it::

    TwinError(Exception)
    ├── ListingError(TwinError, ValueError)     a program listing that says something impossible
    └── CompileError(TwinError)                 a program that the compiler refuses, with rule and remedy
        └── DataflowError                       a launch reads what nothing has written yet

    DeviceHangError(RuntimeError)                    the seam, where the real call would never return
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_twin.constraints import Violation


class TwinError(Exception):
    """Base of everything that the twin raises outside the driver seam."""


class ListingError(TwinError, ValueError):
    """A program listing that is malformed: names the place (``launches[2].operands.a``) and what is wrong.

    ``where`` is that place as a JSON path, empty when the whole file is meant.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


class CompileError(TwinError):
    """The compiler refuses a program.

    ``program`` is its name, ``launch`` the launch at fault (or None) and ``violations`` the rules that it
    breaks, each with its values and, where one exists, a tile that fits.
    """

    def __init__(
        self,
        message: str,
        *,
        program: str,
        launch: str | None = None,
        violations: Sequence[Violation] = (),
    ) -> None:
        super().__init__(message)
        self.program = program
        self.launch = launch
        self.violations = tuple(violations)


class DataflowError(CompileError):
    """A launch reads an intermediate that no earlier launch writes, or an output is never written."""


class DeviceHangError(RuntimeError):
    """Raised by the seam where the real driver call would block for ever.

    What happened: a run that never completes was waited for without a limit (or was never started). Why: on
    silicon the call would hold the interpreter lock and never return. What to do: wait with a limit in
    milliseconds and treat every state other than COMPLETED as an error.
    """
