"""The doctor on made-up machines: what is wrong is named, with a remedy, and nothing else is."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pytest_npu.device import preflight
from pytest_npu.device.preflight import host
from pytest_npu.device.preflight.estimate import estimate
from pytest_npu.device.preflight.machine import Machine

HOST_INFO = json.dumps({"version": "2.25.00"})
PLATFORM = json.dumps({"platforms": [{"status": {"power_mode": "default"}}]})

PYXRT = """
class xrt_info_device:
    name, bdf, host, platform = "name", "bdf", "host", "platform"
class hw_context: pass
class ext: pass
def enumerate_devices(): return {devices}
class device:
    def __init__(self, index): {opening}
    def get_info(self, what):
        answers = {{"name": "NPU Strix", "bdf": "c5:00.1", "host": {host!r}, "platform": {platform!r}}}
        return answers[what]
"""

SMI = """#!/bin/sh
echo '  Version              : {xrt}'
echo '  NPU Firmware Version : 1.5.5'
echo '  Power Mode             : {mode}'
"""


class Bench:
    """Builds a machine in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("sys/bus/pci/devices", "dev/accel", "proc/self", "python", "bin"):
            (root / name).mkdir(parents=True)
        self.write("proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 25165824 kB\n")
        self.write("proc/self/status", "CapEff:\t0000000000004000\n")
        self.write("proc/locks", "")
        env = {"PATH": str(root / "bin"), "PYTHONPATH": str(root / "python")}
        self.machine = Machine(
            root / "sys", root / "dev", root / "proc", root, python=sys.executable, env=env
        )

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def npu(self, device: str = "0x17f0", *, node: bool = True, module: str | None = "2.25.0") -> None:
        pci = "sys/bus/pci/devices/0000:c5:00.1"
        for name, text in {"vendor": "0x1022", "device": device, "revision": "0x10"}.items():
            self.write(f"{pci}/{name}", text + "\n")
        self.write(f"{pci}/vbnv", "NPU Strix\n")
        self.write(f"{pci}/fw_version", "1.5.5\n")
        if module is not None:
            (self.root / pci / "accel/accel0").mkdir(parents=True)
            self.write("sys/module/amdxdna/version", module + "\n")
        if node:
            self.write("dev/accel/accel0", "")

    def pyxrt(self, devices: int = 1, opening: str = "pass") -> None:
        text = PYXRT.format(devices=devices, opening=opening, host=HOST_INFO, platform=PLATFORM)
        self.write("python/pyxrt.py", text)

    def smi(self, xrt: str = "2.25.00", mode: str = "default") -> None:
        self.write("bin/xrt-smi", SMI.format(xrt=xrt, mode=mode)).chmod(0o755)

    def ready(self) -> None:
        self.npu()
        self.pyxrt()
        self.smi()

    def examine(self, **options: object) -> preflight.Report:
        return preflight.examine(self.machine, lock=self.root / "npu.lock", **options)  # type: ignore[arg-type]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def names(findings: tuple[preflight.Finding, ...]) -> list[str]:
    return [finding.name for finding in findings]


def test_a_machine_that_is_ready(bench: Bench) -> None:
    bench.ready()
    report = bench.examine()
    assert report.blocking == ()
    assert report.named("NPU generation").value == "NPU2"
    assert report.named("driver").value == "amdxdna 2.25.0"
    assert report.named("XRT").value == "2.25.00"[:4] + ".0" or report.named("XRT").value == "2.25.0"
    assert (report.named("power mode").value, report.named("power mode").status) == ("default", "info")
    assert report.named("firmware").value == "1.5.5"
    assert preflight.render(report).startswith("NPU (--npu): ready")


def test_a_machine_without_an_npu_is_told_what_it_can_do(bench: Bench) -> None:
    report = bench.examine()
    assert names(report.blocking) == ["NPU", "driver", "pyxrt"]
    assert report.twin_blocking == ()
    text = preflight.render(report)
    assert "digital twin (default): ready" in text
    assert "No module named 'pyxrt'" in text
    assert "python3-xrt" in report.named("pyxrt").remedy


def test_every_bad_finding_has_reason_and_remedy(bench: Bench) -> None:
    for finding in bench.examine().findings:
        assert finding.why
        assert finding.remedy or finding.status not in ("bad", "warning")


def wrong_generation(bench: Bench) -> None:
    (bench.root / "sys/bus/pci/devices/0000:c5:00.1/device").write_text("0x1502\n")


def no_module(bench: Bench) -> None:
    (bench.root / "sys/module/amdxdna/version").unlink()
    (bench.root / "sys/module/amdxdna").rmdir()


def no_node(bench: Bench) -> None:
    (bench.root / "dev/accel/accel0").unlink()


def no_pyxrt_for_this_python(bench: Bench) -> None:
    bench.write("python/pyxrt.py", "raise ImportError('Python version mismatch')")
    bench.write("usr/lib/python3/dist-packages/pyxrt.cpython-314-x86_64-linux-gnu.so", "")


def other_pyxrt(bench: Bench) -> None:
    bench.write("python/pyxrt.py", "def enumerate_devices(): return 1")


def old_xrt(bench: Bench) -> None:
    bench.smi(xrt="2.16.0")


def crashing_pyxrt(bench: Bench) -> None:
    bench.write("python/pyxrt.py", "import os; os.abort()")


def refusing_driver(bench: Bench) -> None:
    bench.pyxrt(opening="raise RuntimeError('Open /dev/accel/accel0 failed (err=-13): Permission denied')")


def crashing_device(bench: Bench) -> None:
    bench.pyxrt(opening="__import__('os').abort()")


def foreign_driver(bench: Bench) -> None:
    bench.pyxrt(opening="raise RuntimeError('CREATE_BO IOCTL failed (err=-25): Inappropriate ioctl')")


def no_memory(bench: Bench) -> None:
    bench.pyxrt(opening="raise RuntimeError('CREATE_BO IOCTL failed (err=-12): Cannot allocate memory')")


def emulation(bench: Bench) -> None:
    bench.machine.env["XCL_EMULATION_MODE"] = "hw_emu"


def blind_pyxrt(bench: Bench) -> None:
    bench.pyxrt(devices=0)


BROKEN = {
    "NPU generation": (wrong_generation, "NPU1", "Strix"),
    "driver": (no_module, "not loaded", "modprobe amdxdna"),
    "access": (no_node, "no device node", "dmesg"),
    "pyxrt": (no_pyxrt_for_this_python, "version mismatch", "is there, but not for this interpreter"),
    "pyxrt ": (other_pyxrt, "no hw_context", "another module may hide it"),
    "pyxrt  ": (crashing_pyxrt, "ended with code -6", "python3-xrt"),
    "XRT": (old_xrt, "2.16.0", "no full-ELF contexts"),
    "device opens": (refusing_driver, "Permission denied", "access"),
    "device opens   ": (crashing_device, "ended with code -6", "modprobe -r amdxdna"),
    "device opens    ": (foreign_driver, "err=-25", "answers to another driver"),
    "device opens     ": (no_memory, "err=-12", "memlock"),
    "device opens      ": (emulation, "XCL_EMULATION_MODE=hw_emu", "unset XCL_EMULATION_MODE"),
    "device opens ": (blind_pyxrt, "sees no device", "libxrt-npu2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_thing_wrong(name: str, bench: Bench) -> None:
    bench.ready()
    breaks, value, remedy = BROKEN[name]
    breaks(bench)
    finding = bench.examine().named(name.strip())
    assert finding.status == "bad"
    assert value in finding.value
    assert remedy in finding.remedy


def test_a_node_without_permission(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing, an unprivileged user, is part of `make conformance`."""
    bench.ready()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    node = bench.root / "dev/accel/accel0"
    node.chmod(0o600)
    finding = bench.examine().named("access")
    assert (finding.status, finding.value.split()[1:]) == ("bad", ["not", "accessible"])
    assert "99-amdxdna.rules" in finding.remedy
    assert f"is for {node.group()} alone" in finding.remedy
    node.chmod(0o660)
    monkeypatch.setattr(Path, "group", lambda path: "render")
    assert bench.examine().named("access").remedy == "sudo usermod -aG render $USER, then log in again"


def test_warnings_do_not_stop_the_work(bench: Bench) -> None:
    bench.npu(module="2.21.75")
    bench.pyxrt()
    bench.smi(xrt="2.27.1", mode="powersaver")
    (bench.root / "proc/4242/fd").mkdir(parents=True)
    (bench.root / "proc/4242/fd/5").symlink_to(bench.root / "dev/accel/accel0")
    bench.write("proc/4242/cmdline", "python3\0other.py\0")
    report = bench.examine()
    warned = {finding.name: finding for finding in report.findings if finding.status == "warning"}
    assert set(warned) == {"driver and XRT", "XRT", "power mode", "other holders"}
    assert warned["other holders"].value == "4242 (python3 other.py)"
    assert "--pmode performance" in warned["power mode"].remedy
    assert "tested with XRT 2.25" in warned["XRT"].remedy
    assert report.blocking == ()


def test_memlock(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8192 * 1024, 8192 * 1024))
    assert "lifted by CAP_IPC_LOCK" in host.memlock(bench.machine, None).value
    bench.write("proc/self/status", "CapEff:\t0000000000000000\n")
    finding = host.memlock(bench.machine, None)
    assert (finding.status, finding.value) == ("bad", "8192 KiB")
    assert "limits.conf" in finding.remedy
    small = estimate("tiny", config(n_layers=1, emb_dim=64, hidden_dim=128, vocab_size=256))
    assert host.memlock(bench.machine, small).status == ("ok" if small.device <= 8192 * 1024 else "bad")


def config(**changes: int) -> SimpleNamespace:
    values = {
        "n_layers": 30,
        "emb_dim": 576,
        "n_heads": 9,
        "n_kv_heads": 3,
        "head_dim": 64,
        "hidden_dim": 1536,
        "vocab_size": 49152,
    }
    return SimpleNamespace(**{**values, **changes}, tied_embeddings=True)


def test_memory_against_the_model(bench: Bench) -> None:
    """SmolLM2-135M has 134.5 million parameters; 27 GB of weights do not fit 24 GiB."""
    small = estimate("smollm2_135m", config())
    assert small.weights == pytest.approx(134.5e6 * 2, rel=0.001)
    ram = {finding.name: finding for finding in host.memory(bench.machine, small)}["RAM"]
    assert ram.status == "ok"
    huge = estimate("huge", config(n_layers=60, emb_dim=4096, hidden_dim=14336, n_heads=64))
    ram = {finding.name: finding for finding in host.memory(bench.machine, huge)}["RAM"]
    assert (ram.status, ram.scope) == ("bad", "host")
    assert "huge needs about" in ram.value


def test_lock_file_and_its_holder(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "npu.lock"
    assert host.lock_file(Machine(), path).value.endswith("free")
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(1, flush=True); "
    code += "time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        finding = host.lock_file(Machine(), path)
        holder.kill()
    assert f"held by {holder.pid} (" in finding.value
    with path.open() as file:  # a shared reader is no holder
        fcntl.flock(file, fcntl.LOCK_SH)
        assert host.lock_file(Machine(), path).value.endswith("free")


def test_artefacts_of_a_model(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.ready()
    monkeypatch.setenv("NPU_ARTEFACTS", str(tmp_path / "artefacts"))
    finding = bench.examine(model="smollm2_135m").named("compiled artefacts")
    assert finding.status == "bad"
    assert "rms_gemv_rope" in finding.value
    programs = finding.data["programs"]
    folder = tmp_path / "artefacts"
    folder.mkdir()
    (folder / "any.elf").write_bytes(b"x")
    entries = {p["digest"]: {"name": p["name"], "file": "any.elf"} for p in programs[1:]}
    (folder / "manifest.json").write_text(json.dumps({"toolchain": "t 1", "entries": entries}))
    finding = bench.examine(model="smollm2_135m").named("compiled artefacts")
    assert f"1 of {len(programs)} for phase 1 missing" in finding.value
    assert finding.value.endswith(programs[0]["name"])
    entries[programs[0]["digest"]] = {"name": programs[0]["name"], "file": "any.elf"}
    (folder / "manifest.json").write_text(json.dumps({"toolchain": "t 1", "entries": entries}))
    report = bench.examine(model="smollm2_135m")
    assert report.named("compiled artefacts").status == "ok"
    assert report.blocking == ()
    (folder / "manifest.json").write_text("{")
    assert "unreadable" in bench.examine(model="smollm2_135m").named("compiled artefacts").value


def test_command_json_and_exit_codes(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setattr(preflight.doctor, "Machine", lambda: bench.machine)
    text, code = preflight.command(None, as_json=True, npu=False)
    answer = json.loads(text)
    assert (code, answer["format"], answer["version"]) == (0, "npu-deploy-doctor", 1)
    assert answer["silicon"] == {"usable": False, "blocking": ["NPU", "driver", "pyxrt"]}
    assert answer["twin"]["usable"]
    assert {"name", "status", "value", "why", "remedy", "scope", "data"} == set(answer["findings"][0])
    assert preflight.command(None, as_json=False, npu=True)[1] == 4
    assert preflight.command("no-such-model", as_json=False, npu=False)[1] == 2
    bench.ready()
    monkeypatch.setattr(host, "Machine", lambda: replace(bench.machine))
    assert preflight.command(None, as_json=False, npu=True)[1] == 0
