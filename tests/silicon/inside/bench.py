"""A one-kernel deployment for the tests in the sandbox: out = a + b, b static, from prebuilt artefacts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llms.llama_kernel_builder import driver
from llms.llama_kernel_builder.cache import KernelCache
from llms.llama_kernel_builder.program import Buffer, Program, leaf_program
from llms.llama_kernel_builder.specs import KernelSpec
from llms.llama_kernel_builder.stitch import Part, stitch
from llms.llama_kernel_builder.toolchains.seam import PrebuiltToolchain

N = 1024
ARTEFACTS = Path("/standin")
ELF = {"file": "full.elf", "kernel": "DPU:main"}
XCLBIN = {"file": "npu.xclbin", "kernel": "MLIR_AIE", "instructions": "txn.bin"}


def add_program(name: str = "add") -> Program:
    """out = a + b, b static."""
    leaf = leaf_program("add", KernelSpec.make("eltwise_add", {"n": N}, "default", {"tile": 128}, (8, 1)))
    buffers = [Buffer("a", (N,)), Buffer("b", (N,), role="static"), Buffer("out", (N,), role="output")]
    return stitch(name, buffers, [Part("add", leaf, {"a": "a", "b": "b", "out": "out"})])


def vector(value: float) -> np.ndarray[Any, Any]:
    """A constant bf16 vector."""
    return np.full(N, value, bfloat16)


def prebuilt(folder: Path, *names: str, entry: dict[str, str] = ELF) -> PrebuiltToolchain:
    """A folder of artefacts for the named programs, all of them the same minimal one."""
    folder.mkdir(parents=True, exist_ok=True)
    for key in ("file", "instructions"):
        if key in entry:
            source = ARTEFACTS / entry[key]
            shutil.copyfile(source, folder / entry[key])
    entries = {add_program(name).digest: {"name": name, **entry} for name in names}
    manifest = {"toolchain": "minimal artefacts 1", "entries": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return PrebuiltToolchain(folder)


def cache(folder: Path, *names: str, entry: dict[str, str] = ELF) -> KernelCache:
    """A kernel cache on the NPU of the stand-in with the named programs."""
    toolchain = prebuilt(folder / "prebuilt", *names, entry=entry)
    made = KernelCache(folder / "cache", driver=driver.select("npu2"), toolchain=toolchain)
    for name in names:
        made.compile_and_cache(add_program(name))
    return made
