"""A stand-in model suite: the plugin is tested without torch, driver or weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

STAND_IN = """
import os
import pytest
import pytest_npu

class Clock:
    seconds = 0.0
    def now(self):
        return self.seconds

class Device:
    clock = Clock()
    def __init__(self, name):
        self.name = name
        self.label = {"twin": "twin (modelled)", "npu2": "npu2 (measured)"}[name]

class Checkpoint:
    label, kind, path, content_hash = "Tiny, random weights", "tiny", "/nowhere", "sha256:1"

class Config:
    def __init__(self):
        self.n_layers = 2

class Deployment:
    checkpoint = Checkpoint()
    model_name = "tiny-instruct"
    config = Config()
    def __init__(self, folder, options):
        self.folder, self.options = folder, options
    def hf_reference(self):
        return "the reference"

opened = []

def pytest_npu_open_device(name):
    if name == "npu2" and not os.environ.get("STAND_IN_SILICON"):
        raise pytest_npu.DeviceUnavailable("pyxrt cannot be imported", "Install XRT")
    return Device(name)

def pytest_npu_open_deployment(folder, options, device):
    opened.append(folder.name)
    return Deployment(folder, options)

@pytest.fixture
def opened_deployments():
    return opened
"""

#: Plugins that would change order or output of the inner runs; tests that want them turn them on again.
QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio")


@dataclass
class Suite:
    """A folder with stand-in models, and short ways to run pytest in it and to look at what it left."""

    pytester: pytest.Pytester

    @property
    def path(self) -> Path:
        return self.pytester.path

    def model(self, name: str = "tiny", **modules: str) -> Path:
        """Create `llms/<name>` with test modules: keyword `a` becomes `tests/test_<name>_a.py`."""
        folder = self.path / "llms" / name
        (folder / "tests").mkdir(parents=True, exist_ok=True)
        (folder / "verify_adapter.py").write_text("")
        for module, text in modules.items():
            (folder / "tests" / f"test_{name}_{module}.py").write_text("import os, time, pytest\n" + text)
        return folder

    def run(self, *args: str) -> pytest.RunResult:
        """Run pytest in this process: quick, for everything that leaves the process intact."""
        return self.pytester.runpytest_inprocess(*QUIET, *args)

    def command(self, *args: str, plugins: str = "") -> list[str]:
        """Command line of a pytest with our plugin and the named ones only; it starts three times as fast."""
        names = ["npu", *plugins.split()]
        return [sys.executable, "-m", "pytest", *(arg for name in names for arg in ("-p", name)), *args]

    def spawn(self, *args: str, plugins: str = "", timeout: float = 60) -> pytest.RunResult:
        """Run pytest in a process of its own, with our plugin and the named ones."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
            return self.pytester.run(*self.command(*args, plugins=plugins), timeout=timeout)

    def start(self, *args: str, plugins: str = "") -> subprocess.Popen[str]:
        """Start the same without waiting."""
        return subprocess.Popen(
            self.command(*args, plugins=plugins),
            cwd=self.path,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def runs(self, model: str = "tiny") -> list[Path]:
        """Run folders of a model, oldest first."""
        parent = self.path / "reports" / model
        return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []

    def events(self, model: str = "tiny") -> list[dict[str, Any]]:
        """Events of the newest run."""
        lines = (self.runs(model)[-1] / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def results(self, model: str = "tiny") -> dict[str, Any]:
        """results.json of the newest run."""
        value: dict[str, Any] = json.loads((self.runs(model)[-1] / "results.json").read_text())
        return value

    def outcomes(self, model: str = "tiny") -> dict[str, str]:
        """Outcome of each test of the newest run, by the name of its function."""
        return {test["nodeid"].partition("::")[2]: test["outcome"] for test in self.results(model)["tests"]}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """An empty folder with the stand-in conftest, free of settings of the outer run."""
    for name in list(os.environ):
        if re.match(r"(PYTEST_(ADDOPTS|XDIST|NPU|DISABLE)|NPU_|OMP_NUM)", name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "160")
    pytester.makeini("[pytest]\naddopts = --strict-markers\n")
    pytester.makeconftest(STAND_IN)
    return Suite(pytester)
