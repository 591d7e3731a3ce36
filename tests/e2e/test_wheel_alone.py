"""The wheel alone, in a repository that knows nothing of this one: `list`, `new`, phase 0."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """`npu-deploy` of an environment with the wheel and our dependencies, without this source tree."""
    # never an index: the backend and every dependency are here already
    build = f"from hatchling.build import build_wheel; print(build_wheel({str(tmp_path)!r}))"
    name = run(sys.executable, "-c", build, cwd=ROOT).splitlines()[-1]
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", where, cwd=tmp_path).strip())
    shutil.unpack_archive(tmp_path / name, site, "zip")
    places = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(places or [sysconfig.get_path("purelib")]))
    script = tmp_path / "npu-deploy"
    script.write_text(f"#!{python}\nfrom npu_deploy.cli import main\nmain()\n")
    script.chmod(0o755)
    return script


@pytest.mark.slow
def test_a_foreign_repository_makes_and_judges_a_model(command: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    shutil.copytree(ROOT / "llms" / "qwen2" / "tiny", tmp_path / "Some-Model")
    places = {"PYTEST_NPU_CACHE": str(tmp_path / "cache"), "NPU_KERNEL_REGISTRY": ""}

    listed = json.loads(run(command, "list", "--json", cwd=project, **places))
    assert {"llama32_1b", "qwen2", "qwen3_0_6b", "smollm2_135m"} <= {row["name"] for row in listed}
    assert not any(row["folder"].startswith(str(ROOT)) for row in listed)

    made = json.loads(run(command, "new", "../Some-Model", "--json", cwd=project, **places))
    assert made["folder"] == str(project / "some_model")
    assert made["rows"]["required"] > 50
    assert (project / "some_model" / ".gitignore").is_file()
    assert len(list((project / "some_model" / "tests").glob("test_*.py"))) == 12

    judged = json.loads(run(command, "run", "some_model", "--to", "0", "--json", cwd=project, **places))
    assert [(phase["phase"], phase["verdict"]) for phase in judged["phases"]] == [(0, "PASS")]
    assert judged["report"].startswith(str(project / "reports" / "some_model"))
    (row,) = json.loads(run(command, "status", "some_model", "--json", cwd=project, **places))["models"]
    assert [phase["state"] for phase in row["phases"][:2]] == ["holds", "not run"]
