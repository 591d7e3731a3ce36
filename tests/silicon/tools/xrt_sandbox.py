"""A Debian sid chroot with AMD's real pyxrt 2.25, its NPU user driver and the kernel stand-in of this folder.

Debian sid is where pyxrt is packaged; it needs Python 3.14 and a newer glibc than stable has, hence the
chroot. It is built once in the cache folder and used again after that.

Command line:
    python3 xrt_sandbox.py build                     build it, or say where it is
    python3 xrt_sandbox.py run [--no-device] CMD...  run a command in it

Needs root (chroot, private mounts) on a Debian or Ubuntu machine; a missing debootstrap is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[2]
EXPECTED_XRT = "2.25"
SUITE = "sid"
PACKAGES = (
    "python3",
    "python3-jinja2",
    "python3-ml-dtypes",
    "python3-numpy",
    "python3-pytest",
    "python3-xrt",
    "libxrt2",
    "libxrt-npu2",
    "libxrt-utils",
    "libxrt-utils-npu",
    "gcc",
    "libc6-dev",
    "linux-libc-dev",
)
#: The sandbox is rebuilt when this changes.
RECIPE = hashlib.sha256("\n".join((SUITE, *PACKAGES, "1")).encode()).hexdigest()[:10]
SOURCES = (
    "amdxdna_standin.c",
    "npu_artefacts.py",
    "xclbin/kernel.json",
    "xclbin/memory.json",
    "xclbin/partition.json",
)
XCLBIN = (
    "xclbinutil --add-replace-section MEM_TOPOLOGY:JSON:memory.json --add-kernel kernel.json "
    "--add-replace-section AIE_PARTITION:JSON:partition.json --force --quiet --output npu.xclbin"
)


class SandboxError(Exception):
    """The sandbox cannot be built or entered on this machine; the text says why and what would help."""


@dataclass(frozen=True)
class Sandbox:
    """A ready sandbox: its folder and the version of XRT in it (as Debian writes it, without epoch)."""

    root: Path
    xrt_version: str

    @property
    def as_expected(self) -> bool:
        """Whether it holds the release that the conformance rows were taken from."""
        return self.xrt_version.startswith(EXPECTED_XRT + ".")

    def run(
        self,
        command: Sequence[str],
        *,
        mode: str = "device",
        env: Mapping[str, str] | None = None,
        out: Path | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, with the project on /project (read-only) and `out` on /out.

        `mode`: "device" (stand-in NPU), "no-device", or "locked" (a node that the user may not open).
        """
        variables = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if mode != "no-device":
            variables["LD_PRELOAD"] = "/standin/libamdxdna_standin.so"
        variables.update(env or {})
        inner = ["/usr/bin/env", "-i", *(f"{key}={value}" for key, value in variables.items()), *command]
        return subprocess.run(
            [str(HERE / "enter_sandbox.sh"), str(self.root), mode, str(PROJECT), str(out or "-"), *inner],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )


def cache_folder() -> Path:
    """Where sandboxes are kept: below the cache of the project, which `$PYTEST_NPU_CACHE` moves."""
    own = os.environ.get("PYTEST_NPU_CACHE")
    if own:
        return Path(own).expanduser().absolute() / "sandbox"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-npu" / "sandbox"


def prepare() -> Sandbox:
    """Return the sandbox, building it when it is not in the cache.

    Raises SandboxError when this machine cannot build or enter it.
    """
    if os.geteuid() != 0:
        raise SandboxError(
            "the sandbox needs root for chroot and mounts; run it as root or in a CI container"
        )
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    root = folder / f"{SUITE}-xrt-{RECIPE}"
    with _exclusive(folder / "build.lock"):
        if not (root / "ready.json").is_file():
            _build(folder, root)
        version = str(json.loads((root / "ready.json").read_text(encoding="utf-8"))["xrt"])
        _install_standin(root)
    return Sandbox(root, version)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path, root: Path) -> None:
    """Build in a folder of its own and rename it at the end, so that a killed build leaves nothing usable."""
    for stale in folder.glob("building-*"):  # the lock is ours: whoever made it is gone
        shutil.rmtree(stale, ignore_errors=True)
    begin = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="building-", dir=folder))
    work.chmod(0o755)
    _say(f"building the XRT sandbox in {root} (once; about 300 MB of packages)")
    _call([_debootstrap(), "--variant=minbase", SUITE, str(work), *_mirror()], "debootstrap")
    install = ["apt-get", "-q", "-y", "-o", "Acquire::Retries=3", "-o", "Dpkg::Options::=--force-unsafe-io"]
    _call(["chroot", str(work), *install, "install", "--no-install-recommends", *PACKAGES], "apt-get install")
    _call(["chroot", str(work), "apt-get", "clean"], "apt-get clean")
    for name in ("project", "out", "standin", "dev/accel"):
        (work / name).mkdir(parents=True, exist_ok=True)
    found = subprocess.run(
        ["chroot", str(work), "dpkg-query", "-W", "-f", "${Version}", "python3-xrt"],
        capture_output=True,
        text=True,
        check=True,
    )
    version = found.stdout.strip().split(":", 1)[-1]
    (work / "ready.json").write_text(json.dumps({"xrt": version, "packages": PACKAGES}, indent=1) + "\n")
    shutil.rmtree(root, ignore_errors=True)
    work.replace(root)
    _say(f"sandbox with XRT {version} ready after {time.monotonic() - begin:.0f} s")


def _install_standin(root: Path) -> None:
    """Compile the stand-in and make the artefacts inside, when their sources changed."""
    mark = hashlib.sha256(b"\0".join((HERE / name).read_bytes() for name in SOURCES)).hexdigest()
    target = root / "standin"
    stamp = target / "sources.sha256"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == mark:
        return
    for name in SOURCES:
        shutil.copyfile(HERE / name, target / Path(name).name)
    steps = (
        "cd /standin",
        "gcc -O1 -Wall -shared -fPIC -o libamdxdna_standin.so amdxdna_standin.c -lpthread",
        "python3 npu_artefacts.py .",
        XCLBIN,
    )
    _call(["chroot", str(root), "sh", "-c", " && ".join(steps)], "building the kernel stand-in")
    stamp.write_text(mark, encoding="utf-8")


def _debootstrap() -> str:
    if not shutil.which("debootstrap"):
        if not shutil.which("apt-get"):
            raise SandboxError("debootstrap is missing and there is no apt-get to install it with")
        _say("installing debootstrap")
        install = ["apt-get", "install", "-y", "--no-install-recommends", "debootstrap"]
        if subprocess.run(install, capture_output=True, check=False).returncode != 0:
            _call(["apt-get", "update"], "apt-get update")
            _call(install, "installing debootstrap")
    return shutil.which("debootstrap") or "debootstrap"


def _mirror() -> list[str]:
    """The Debian mirror that apt already uses here; without one debootstrap takes its own default."""
    if not shutil.which("apt-get"):
        return []
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)"], capture_output=True, text=True, check=False
    )
    sites = [s for s in listed.stdout.split() if s.rstrip("/").endswith("/debian") and "security" not in s]
    return sites[:1]


def _call(command: list[str], what: str) -> None:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=env, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise SandboxError(f"{what} failed (exit code {done.returncode}):\n{tail}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Command line."""
    if not arguments or arguments[0] not in ("build", "run"):
        print(__doc__)
        return 2
    try:
        sandbox = prepare()
    except SandboxError as error:
        _say(f"error: {error}")
        return 3
    if arguments[0] == "build":
        print(f"{sandbox.root}  XRT {sandbox.xrt_version}")
        return 0
    rest = list(arguments[1:])
    mode = "no-device" if rest[:1] == ["--no-device"] else "device"
    done = sandbox.run(rest[1:] if mode == "no-device" else rest, mode=mode, timeout=600)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
