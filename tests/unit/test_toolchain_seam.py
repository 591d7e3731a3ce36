"""A second toolchain needs nothing but the program: every build input is in it; no model or gate knows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llms.llama_kernel_builder.artefacts import ArtefactStore, TornArtefactWarning, loading_of
from llms.llama_kernel_builder.exceptions import ArtefactMissing
from llms.llama_kernel_builder.llama_loop import all_programs
from llms.llama_kernel_builder.program import Program
from llms.llama_kernel_builder.toolchain import (
    Loading,
    PrebuiltToolchain,
    TwinToolchain,
    prebuilt_folder,
    toolchain_for,
)
from llms.smollm2_135m import smollm2_135m_inference as inference
from llms.smollm2_135m.verify_adapter import build_config

PROJECT = Path(__file__).resolve().parents[2]


def programs() -> list[Program]:
    return list(all_programs(inference.SEQUENCE, build_config()))


class BuildSheet:
    """Stands for a toolchain of mlir-air: writes what such a build would be given."""

    identity = "build sheet 1"

    def compile(self, program: Program, destination: Path) -> Loading | None:
        sheet: dict[str, Any] = {
            "function": program.name,
            "backend": dict(program.options),
            "arguments": [(b.name, b.shape, b.dtype) for b in program.buffers],
            "launches": [
                {
                    "op": launch.spec.op,
                    "method": launch.spec.method,
                    "dims": dict(launch.spec.dims),
                    "tile": dict(launch.spec.tile),
                    "herd": launch.spec.herd,
                    "rounding": launch.spec.rounding,
                    "operands": {name: (s.dtype, s.shape) for name, s in launch.spec.signature().items()},
                    "bound": {name: (ref.buffer, ref.offset) for name, ref in launch.operands},
                    "symbol": launch.spec.symbol,
                    "object": launch.spec.object_file,
                }
                for launch in program.launches
            ],
        }
        destination.write_text(json.dumps(sheet))
        destination.with_suffix(".insts").write_bytes(b"\0" * 8)
        return Loading(f"main:{program.name}", destination.with_suffix(".insts").name)


def test_everything_a_build_needs_is_in_the_program(tmp_path: Path) -> None:
    store = ArtefactStore(tmp_path, BuildSheet())
    for program in programs():
        sheet = json.loads(store.get(program).path.read_text())
        for launch in sheet["launches"]:
            assert launch["op"]
            assert launch["method"]
            assert launch["dims"]
            assert launch["herd"]
            assert launch["object"] == launch["symbol"] + ".o"
            assert {dtype for dtype, _ in launch["operands"].values()} <= {"bf16", "f32"}
            assert set(launch["bound"]) == set(launch["operands"])


def test_objects_of_different_tiles_have_different_symbols() -> None:
    """An object compiled for another tile computes wrong numbers, so one symbol means one tile and method."""
    for program in programs():
        seen: dict[str, tuple[Any, ...]] = {}
        for launch in program.launches:
            spec = launch.spec
            meaning = (spec.op, spec.method, spec.tile)
            assert seen.setdefault(spec.symbol, meaning) == meaning


def test_how_to_load_stands_in_the_record(tmp_path: Path) -> None:
    program = programs()[0]
    store = ArtefactStore(tmp_path, BuildSheet())
    artefact = store.get(program)
    loading = loading_of(artefact.path, program.name)
    assert loading.kernel == f"main:{program.name}"
    assert Path(str(loading.instructions)).read_bytes() == b"\0" * 8
    assert not store.get(program).built
    Path(str(loading.instructions)).write_bytes(b"torn")
    with pytest.warns(TornArtefactWarning):
        assert store.get(program).built
    assert loading_of(tmp_path / "foreign.elf", "p") == Loading("p")


def test_prebuilt_artefacts_with_kernel_name_and_instructions(tmp_path: Path) -> None:
    program = programs()[0]
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    (folder / "a.xclbin").write_bytes(b"image")
    entry = {"name": program.name, "file": "a.xclbin", "kernel": "MLIR_AIE", "instructions": "a.txt"}
    (folder / "manifest.json").write_text(
        json.dumps({"toolchain": "t 1", "entries": {program.digest: entry}})
    )
    toolchain = PrebuiltToolchain(folder)
    assert toolchain.missing([program]) == (program.name,)  # the instruction file is not there
    (folder / "a.txt").write_bytes(b"code")
    assert toolchain.missing([program]) == ()
    artefact = ArtefactStore(tmp_path / "cache", toolchain).get(program)
    assert artefact.path.read_bytes() == b"image"
    loading = loading_of(artefact.path, program.name)
    assert (loading.kernel, Path(str(loading.instructions)).read_bytes()) == ("MLIR_AIE", b"code")


def test_silicon_is_served_prebuilt_artefacts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_ARTEFACTS", str(tmp_path))
    assert isinstance(toolchain_for("twin", "smollm2_135m"), TwinToolchain)
    toolchain = toolchain_for("npu2", "smollm2_135m")
    assert isinstance(toolchain, PrebuiltToolchain)
    program = programs()[0]
    with pytest.raises(ArtefactMissing, match=program.name):
        toolchain.compile(program, tmp_path / "x.elf")
    (tmp_path / "smollm2_135m").mkdir()
    (tmp_path / "smollm2_135m" / "manifest.json").write_text('{"toolchain": "t", "entries": {}}')
    assert prebuilt_folder("smollm2_135m") == tmp_path / "smollm2_135m"
    assert prebuilt_folder("qwen2") == tmp_path


def test_no_model_and_no_gate_names_a_toolchain() -> None:
    files = [
        *PROJECT.glob("llms/*/[!t]*.py"),
        *PROJECT.glob("llms/verify/*.py"),
        *PROJECT.glob("llms/*/tests/*.py"),
    ]
    models = [
        path for path in files if path.parent.name not in ("llama_kernel_builder", "preflight", "deploy")
    ]
    assert len(models) > 20
    guilty = [path for path in models if re.search(r"\w+Toolchain\b", path.read_text(encoding="utf-8"))]
    assert guilty == []
