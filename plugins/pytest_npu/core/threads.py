"""Threads of numerical libraries: few per xdist worker, and none that waits for work by spinning."""

from __future__ import annotations

import os
import sys

import pytest

WAIT_POLICY = "OMP_WAIT_POLICY"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def let_threads_sleep(config: pytest.Config) -> None:
    """Let idle OpenMP threads sleep in this run and its children, unless the user chose a policy.

    Spinning threads take the cores from whoever has work: with shared cores a decode step was measured to
    take ten times as long. OpenMP reads the variable when torch loads it, so it is set before that or never.
    """
    if WAIT_POLICY in os.environ or "torch" in sys.modules:
        return
    os.environ[WAIT_POLICY] = "PASSIVE"

    def restore() -> None:
        os.environ.pop(WAIT_POLICY, None)

    config.add_cleanup(restore)


def cap_threads(count: int) -> None:
    """Limit the threads of numerical libraries in this process, unless the user set a limit."""
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, str(max(1, count)))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
