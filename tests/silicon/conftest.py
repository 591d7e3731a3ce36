"""The tools folder is importable for the tests here; the sandbox is prepared once per run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "tools"))

import xrt_sandbox

LINES: pytest.StashKey[list[str]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LINES] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[LINES]:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> list[str]:
    """Lines to print at the end of the run."""
    return pytestconfig.stash[LINES]


@pytest.fixture(scope="session")
def sandbox(say: list[str]) -> xrt_sandbox.Sandbox:
    """The chroot with the real pyxrt. Ends the run where there can be none."""
    try:
        made = xrt_sandbox.prepare()
    except xrt_sandbox.SandboxError as error:
        pytest.exit(f"conformance cannot run here: {error}", returncode=4)
    if not made.as_expected:
        # not a failure of ours, and no success either
        pytest.exit(
            f"NOT JUDGED: the Debian archive has XRT {made.xrt_version}, the rows are of XRT "
            f"{xrt_sandbox.EXPECTED_XRT}; record them anew (NPU_RECORD=1) after a look at the differences",
            returncode=5,
        )
    return made
