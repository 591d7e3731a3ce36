"""A second toolchain needs nothing but the program: every build input is in it; no model or gate knows."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from llms.llama_kernel_builder.artefacts import ArtefactStore, TornArtefactWarning, loading_of
from llms.llama_kernel_builder.backend import BackendOptions, options_of
from llms.llama_kernel_builder.cache import KernelCache
from llms.llama_kernel_builder.driver import current
from llms.llama_kernel_builder.exceptions import ArtefactMissing, ToolkitError
from llms.llama_kernel_builder.llama_loop import all_programs
from llms.llama_kernel_builder.program import Buffer, Launch, OperandRef, Program, leaf_program
from llms.llama_kernel_builder.specs import KernelSpec
from llms.llama_kernel_builder.toolchains.seam import (
    Loading,
    PrebuiltToolchain,
    TwinToolchain,
    prebuilt_folder,
    toolchain_for,
)
from llms.smollm2_135m import smollm2_135m_inference as inference
from llms.smollm2_135m.verify_adapter import CONFIG
from npu_twin.listing import Listing

PROJECT = Path(__file__).resolve().parents[2]


def programs() -> list[Program]:
    return list(all_programs(inference.SEQUENCE, CONFIG))


def build_sheet(program: Program) -> dict[str, Any]:
    """What a build of mlir-air is given, from the public fields of a program and nothing else."""
    backend = program.backend
    return {
        "function": program.instance_name,
        "backend": {
            "instance_name": program.instance_name,
            "output_format": backend.output_format,
            "omit_pingpong": "" if backend.ping_pong else "all",
            "omit_while_true_loop": backend.omit_while_true_loop,
            "runtime_loop_tiling_sizes": list(backend.runtime_loop_tiling_sizes),
            "bf16_emulation": backend.bf16_emulation,
            "target_device": backend.target,
        },
        "arguments": [[b.name, list(b.shape), b.dtype, b.role] for b in program.buffers],
        "placeholders": sorted(program.placeholders),
        "launches": [
            {
                "name": launch.name,
                "op": launch.spec.op,
                "method": launch.spec.method,
                "dims": dict(launch.spec.dims),
                "tile": dict(launch.spec.tile),
                "herd": list(launch.spec.herd),
                "attrs": dict(launch.spec.attrs),
                "rounding": launch.spec.rounding,
                "operands": {name: [s.dtype, list(s.shape)] for name, s in launch.spec.signature().items()},
                "bound": {name: [ref.buffer, ref.offset, ref.shape] for name, ref in launch.operands},
                "symbol": launch.spec.symbol,
                "object": launch.spec.object_file,
            }
            for launch in program.launches
        ],
    }


class BuildSheet:
    """Stands for a toolchain of mlir-air: writes what such a build would be given."""

    identity = "build sheet 1"

    def compile(self, program: Program, destination: Path) -> Loading | None:
        destination.write_text(json.dumps(build_sheet(program)))
        destination.with_suffix(".insts").write_bytes(b"\0" * 8)
        return Loading(f"main:{program.instance_name}", destination.with_suffix(".insts").name)


class SheetToTwin:
    """A second toolchain whose artefacts run: the twin's listing, made from a build sheet alone."""

    identity = "sheet to twin 1"
    built: ClassVar[list[str]] = []

    def __init__(self, device: str, model: str) -> None:
        self.asked = (device, model)

    def compile(self, program: Program, destination: Path) -> Loading | None:
        sheet = json.loads(json.dumps(build_sheet(program)))
        launches = []
        for one in sheet["launches"]:
            bound = {
                name: {"arg": arg, "offset": offset, "shape": shape or one["operands"][name][1]}
                for name, (arg, offset, shape) in one["bound"].items()
            }
            kept = {
                key: one[key] for key in ("name", "op", "method", "dims", "tile", "herd", "attrs", "symbol")
            }
            launches.append({**kept, "object_file": one["object"], "operands": bound})
            if one["rounding"]:
                launches[-1]["rounding"] = one["rounding"]
        names = ("name", "shape", "dtype", "role")
        listing = Listing.from_mapping(
            {
                "name": sheet["function"],
                "arguments": [dict(zip(names, argument, strict=True)) for argument in sheet["arguments"]],
                "launches": launches,
                "options": sheet["backend"],
            }
        )
        destination.write_text(listing.to_json(), encoding="utf-8")
        self.built.append(program.name)
        return None


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
            assert re.fullmatch(r"[a-z]\w*", launch["symbol"])
            assert {dtype for dtype, _ in launch["operands"].values()} <= {"bf16", "f32"}
            assert set(launch["bound"]) == set(launch["operands"])


def test_objects_of_different_tiles_have_different_symbols() -> None:
    """An object compiled for another tile computes wrong numbers: one symbol is one object everywhere."""
    seen: dict[str, tuple[Any, ...]] = {}
    for program in programs():
        for spec in (launch.spec for launch in program.launches):
            meaning = (spec.op, spec.method, spec.tile, spec.attrs, spec.dtype_out, spec.rounding)
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
    assert toolchain.lacking([program]) == (program,)  # the instruction file is not there
    (folder / "a.txt").write_bytes(b"code")
    assert toolchain.lacking([program]) == ()
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


def small(**changed: Any) -> Program:
    """One norm and one add; each keyword changes one thing that a build depends on."""
    spec = KernelSpec.make(
        "rms_norm",
        {"M": 8, "N": changed.get("n", 64)},
        changed.get("method", "weighted"),
        changed.get("tile", {"vector": 16}),
        changed.get("herd", (1, 1)),
        {"eps": changed.get("eps", 1e-5)},
        rounding=changed.get("rounding"),
    )
    shape = (8, changed.get("n", 64))
    buffers = [
        Buffer(changed.get("argument", "x"), shape, role=changed.get("role", "input")),
        Buffer("w", shape[1:], role="static"),
        Buffer("out", shape, role="output"),
    ]
    if "placeholder" in changed:
        buffers.append(Buffer("spare", (4,)))
    refs = (("x", OperandRef(buffers[0].name)), ("w", OperandRef("w")), ("out", OperandRef("out")))
    launch = Launch(changed.get("launch", "rms"), spec, refs)
    return Program(
        changed.get("name", "small"),
        tuple(buffers),
        (launch,),
        changed.get("options"),
        frozenset(["spare"] if "placeholder" in changed else []),
    )


def plain(**changed: Any) -> BackendOptions:
    return replace(small().backend, **changed)


CHANGES: dict[str, dict[str, Any]] = {
    "name": {"name": "other"},
    "dims": {"n": 128},
    "method": {"method": "plain"},
    "tile": {"tile": {"vector": 32}},
    "herd": {"herd": (2, 1)},
    "attribute": {"eps": 1e-6},
    "rounding": {"rounding": "floor"},
    "argument name": {"argument": "y"},
    "role": {"role": "static"},
    "launch name": {"launch": "norm"},
    "placeholder": {"placeholder": True},
    "output_format": {"options": plain(output_format="xclbin")},
    "ping_pong": {"options": plain(ping_pong=False)},
    "omit_while_true_loop": {"options": plain(omit_while_true_loop=True)},
    "runtime_loop_tiling_sizes": {"options": plain(runtime_loop_tiling_sizes=(4, 4))},
    "bf16_emulation": {"options": plain(bf16_emulation=False)},
    "target": {"options": plain(target="npu1")},
}


@pytest.mark.parametrize("field", CHANGES)
def test_the_digest_covers(field: str) -> None:
    assert small(**CHANGES[field]).digest != small().digest


def test_no_option_is_left_out_of_the_changes() -> None:
    assert {option.name for option in fields(BackendOptions)} <= set(CHANGES)


@pytest.mark.parametrize("name", ["symbol", "object_file"])
def test_the_digest_covers_what_is_derived(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = small().digest
    monkeypatch.setattr(KernelSpec, name, property(lambda self: "another"))
    assert small().digest != before


def test_the_digest_covers_dtype_and_place_of_operands() -> None:
    def one(dtype: str = "bf16", offset: int = 0) -> str:
        spec = KernelSpec.make("gemm", {"M": 8, "K": 8, "N": 8}, "external", {"tile_m": 8}, dtype_out=dtype)
        refs = {"a": OperandRef("a"), "b": OperandRef("b", offset, (8, 8)), "out": OperandRef("out")}
        buffers = (Buffer("a", (8, 8)), Buffer("b", (2, 8, 8)), Buffer("out", (8, 8), dtype, "output"))
        return Program("p", buffers, (Launch("g", spec, tuple(refs.items())),)).digest

    assert len({one(), one("f32"), one(offset=64)}) == 3


def test_options_follow_from_the_launches() -> None:
    """Rules V4, V5, F15 and B3 of the published constraints, by their published cases."""

    def gemv(k: int, tile_m: int, m_input: int) -> KernelSpec:
        return KernelSpec.make(
            "gemv", {"M": 1024, "K": k}, "external", {"tile_m": tile_m, "m_input": m_input}
        )

    def attention(head_dim: int, dv_tile: int) -> KernelSpec:
        dims = {"lq": 256, "lk": 256, "head_dim": head_dim, "q_heads": 2, "kv_heads": 1}
        method = "seq_first" if head_dim == 64 else "head_first"
        return KernelSpec.make("flash_attention", dims, method, {"dv_tile": dv_tile})

    assert options_of([gemv(2048, 8, 4)]).ping_pong
    assert not options_of([gemv(2048, 8, 4), gemv(8192, 2, 2)]).ping_pong  # one flag for the module
    assert not options_of([gemv(4096, 8, 4)]).ping_pong  # two copies need m_input 2
    assert options_of([gemv(4096, 4, 2)]).ping_pong
    assert options_of([attention(64, 64)]).runtime_loop_tiling_sizes == (16, 16)
    assert options_of([attention(128, 64)]).runtime_loop_tiling_sizes == (16, 16, 16)
    assert leaf_program("p", gemv(2048, 8, 4)).backend.runtime_loop_tiling_sizes == (4, 4)


def test_a_second_toolchain_runs_a_model_and_its_gates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named in the environment, it serves kernels and model; no model and no gate is touched."""
    from llms.llama_kernel_builder.bench import spec_of
    from llms.verify.contract.deployment import Deployment
    from llms.verify.gates.phase1 import gate as phase1

    monkeypatch.setenv("NPU_TOOLCHAIN", f"{__name__}:SheetToTwin")
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path))
    monkeypatch.setattr(SheetToTwin, "built", [])
    folder = PROJECT / "llms" / "smollm2_135m"
    deployment = Deployment.from_folder(folder, checkpoint=folder / "tiny")
    kernels = phase1.kernels(folder, deployment.adapter, checkpoint=folder / "tiny")
    kernel = next(kernel for kernel in kernels if kernel.case.op == "rms_norm")
    assert phase1.check(kernel).ok
    runner = deployment.runner(128)
    record = runner.prefill(np.array([5, 6, 7]))
    step = runner.decode_step(record.top1_token, 3)
    assert np.isfinite(step.lm_head_logits).all()
    ours = SheetToTwin.built[:]
    assert spec_of(kernel.case).symbol in ours
    assert {"rms_gemms_rope_s128", "flash_attn_s128", "rms_gemv_rope", "lm_head_gemv"} <= set(ours)
    monkeypatch.delenv("NPU_TOOLCHAIN")
    theirs = Deployment.from_folder(folder, checkpoint=folder / "tiny").runner(128)
    assert np.array_equal(record.logits_at_pred, theirs.prefill(np.array([5, 6, 7])).logits_at_pred)
    assert SheetToTwin.built == ours


@pytest.mark.parametrize(
    "named", ["nothing", "no.such:thing", f"{__name__}:missing", "json:loads", "builtins:dict"]
)
def test_a_toolchain_that_is_none_is_named(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_TOOLCHAIN", named)
    with pytest.raises(ToolkitError, match="NPU_TOOLCHAIN="):
        toolchain_for("npu2", "smollm2_135m")


def test_a_cache_has_the_toolchain_of_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Used directly, without a toolchain: the twin compiles, silicon needs what was built."""
    monkeypatch.setenv("NPU_ARTEFACTS", str(tmp_path / "none"))
    twin = current()
    assert KernelCache(tmp_path, driver=twin).compile_and_cache(programs()[0]).built
    silicon = KernelCache(tmp_path, driver=replace(twin, name="npu2"))
    with pytest.raises(ArtefactMissing, match=rf"{programs()[0].name} in .*none; build them .*NPU_ARTEFACTS"):
        silicon.compile_and_cache(programs()[0])


def test_no_model_and_no_gate_names_a_toolchain() -> None:
    toolkit = PROJECT / "llms" / "llama_kernel_builder"
    models = [path for path in PROJECT.glob("llms/**/*.py") if toolkit not in path.parents]
    assert len(models) > 100
    guilty = [path for path in models if re.search(r"\w+Toolchain\b", path.read_text(encoding="utf-8"))]
    assert guilty == []


#: The seam itself, and what predicts or measures on the twin by its name. Faults of a deployment's own code
#: are declared in the twin's terms (llms/faults) and are no part of a run.
SEAM = {
    "llama_kernel_builder/driver.py",
    "llama_kernel_builder/toolchains/seam.py",
    "llama_kernel_builder/bench.py",
    "llama_kernel_builder/deployment/describe.py",
}


def asks_for_the_device(source: str) -> list[str]:
    """Comparisons with a device's name, and imports of the twin, of one module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            names = {
                getattr(part, "attr", getattr(part, "id", getattr(part, "value", "")))
                for part in (node.left, *node.comparators)
            }
            if names & {"TWIN", "NPU2", "twin", "npu2"}:
                found.append(ast.unparse(node))
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            modules = (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
            found += [ast.unparse(node) for name in modules if name.partition(".")[0] == "npu_twin"]
    return found


def test_nothing_above_the_driver_asks_which_device_it_is_on() -> None:
    llms = PROJECT / "llms"
    inside = {path.relative_to(llms).as_posix(): path for path in llms.rglob("*.py")}
    files = [path for name, path in inside.items() if name not in SEAM and not name.startswith("faults/")]
    assert len(files) > 150
    asked = {str(path): found for path in files if (found := asks_for_the_device(path.read_text("utf-8")))}
    assert asked == {}


def test_asking_shows() -> None:
    for guilty in (
        "driver.name == 'twin'",
        "x = 1 if current().name != NPU2 else 2",
        "from npu_twin import clock",
    ):
        assert asks_for_the_device(guilty)
    assert asks_for_the_device("driver.select(driver.NPU2 if args.npu else driver.TWIN)") == []
