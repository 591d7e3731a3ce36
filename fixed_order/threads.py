"""Running a task on the threads that torch already has.

torch brings an OpenMP runtime whose threads wait between its own parallel regions. Kernels borrow them by the
entry point that compilers call, so there is no second pool to fight with, ``torch.set_num_threads`` and
``OMP_NUM_THREADS`` count for both, and a call costs microseconds. Without such a runtime the caller does all
the work; the bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

_TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@lru_cache(maxsize=1)
def _parallel() -> Any:
    """``GOMP_parallel`` of the OpenMP runtime in this process, or None."""
    import torch  # noqa: F401  (brings the runtime)

    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = {line.split(maxsplit=5)[-1].strip() for line in maps.splitlines() if "omp" in line}
    for path in sorted(found):
        if Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
            try:
                call = ctypes.CDLL(path).GOMP_parallel
            except (OSError, AttributeError):
                continue
            call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            call.restype = None
            return call
    return None


@lru_cache(maxsize=1)
def _threads() -> Callable[[], int]:
    import torch

    get: Callable[[], int] = torch.get_num_threads
    return get


def available() -> int:
    """Return the most threads that a call may run on: torch's number."""
    return _threads()()


@lru_cache(maxsize=64)
def _function(address: int) -> Callable[[int], None]:
    return _TASK(address)


class Call:
    """A task with its arguments, ready to run again and again.

    Args:
        address: of the function.
        arguments: all slots after ``taken``: the number of pieces, then what the task asks for; addresses of
            arrays are theirs to keep alive, see ``keep``.
        keep: arrays that must live as long as this object.
        alone: whether the work is too small to be shared out.
    """

    __slots__ = ("_address", "_at", "_function", "_keep", "_pieces", "slots")

    def __init__(self, address: int, arguments: list[int], keep: tuple[Any, ...], *, alone: bool) -> None:
        self.slots = np.array([0, *arguments], np.int64)
        self._at = self.slots.ctypes.data
        self._address, self._function = address, _function(address)
        self._keep = keep
        self._pieces = 1 if alone else int(arguments[0])

    def __call__(self) -> None:
        """Do all pieces; returns when they are done."""
        self.slots[0] = 0
        if self._pieces > 1:
            count = min(_threads()(), self._pieces)
            parallel = _parallel()
            if count > 1 and parallel is not None:
                parallel(self._address, self._at, count, 0)
                return
        self._function(self._at)
