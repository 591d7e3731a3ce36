"""Faults of the kind "this program must never be built": a launch that breaks a rule of the tool chain.

Planted as a builder would do it: every program that is compiled inside the block gets the launch as well.
The name of the compiler changes with it, so that no artefact of a clean compiler is taken from a cache, and
none of this one is left there for a clean one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from npu_twin import compiler
from npu_twin.faults._types import Fault
from npu_twin.ops import OPS

_REGISTRY = "Xilinx/mlir-air e972f2942, programming_examples/kernel_registry/details/"
_SKILLS = "Xilinx/mlir-air e972f2942, .claude/skills/"
_GEMM_KEYS = ("tile_m", "tile_k_l2", "tile_k_l1", "tile_n")
_ALIEN = "planted"

Request = dict[str, Any]
Change = Callable[[Request], Request]


@contextlib.contextmanager
def requests(label: str, change: Change) -> Iterator[None]:
    """Compile ``change(request)`` instead of every request, by a compiler whose name holds ``label``."""
    right = compiler.compile_program

    def changed(program: Mapping[str, object]) -> Any:
        return right(change(dict(program)))

    other = f"{compiler.TOOLCHAIN_IDENTITY}, with the fault {label}"
    with (
        mock.patch.object(compiler, "compile_program", changed),
        mock.patch.object(compiler, "TOOLCHAIN_IDENTITY", other),
    ):
        yield


def with_launch(launch: Request) -> Change:
    """Add a launch with arguments of its own to a request."""
    signature = OPS[launch["op"]].signature(launch["dims"], launch["method"], launch["tile"])
    arguments = []
    for operand, spec in signature.items():
        role = "input" if spec.access == "read" else "output"
        if operand == "scratch":
            role = "intermediate"
        arguments.append(
            {"name": f"{_ALIEN}_{operand}", "shape": list(spec.shape), "dtype": spec.dtype, "role": role}
        )
    operands = {operand: {"arg": f"{_ALIEN}_{operand}"} for operand in signature}
    full = {"name": _ALIEN, "attrs": {}, **launch, "operands": operands}

    def change(request: Request) -> Request:
        return {
            **request,
            "arguments": [*request["arguments"], *arguments],
            "launches": [*request["launches"], full],
        }

    return change


def _gemm(
    m: int, k: int, n: int, method: str, tile: tuple[int, int, int, int], herd: tuple[int, int]
) -> Request:
    tiles = dict(zip(_GEMM_KEYS, tile, strict=True))
    return {
        "op": "gemm",
        "method": method,
        "dims": {"M": m, "K": k, "N": n},
        "tile": tiles,
        "herd": list(herd),
    }


def _gemv(m: int, k: int, tile_m: int, m_input: int) -> Request:
    tile = {"tile_m": tile_m, "m_input": m_input}
    return {"op": "gemv", "method": "external", "dims": {"M": m, "K": k}, "tile": tile, "herd": [8, 1]}


def _stream(op: str, n: int, tile: int, herd: tuple[int, int]) -> Request:
    key = "tile" if op == "eltwise_add" else "tile_n"
    return {"op": op, "method": "default", "dims": {"n": n}, "tile": {key: tile}, "herd": list(herd)}


def _fault(name: str, entry: str, what: str, rule: str, source: str, change: Change, says: str = "") -> Fault:
    return Fault(
        name,
        "compile",
        what,
        source,
        "compile",
        lambda: requests(name, change),
        entry,
        raises="CompileFailed",
        says=says or f"rule {rule} ",
    )


def _unused_argument(request: Request) -> Request:
    extra = {"name": _ALIEN, "shape": [16], "dtype": "bf16", "role": "input"}
    return {**request, "arguments": [*request["arguments"], extra]}


def _one_name(request: Request) -> Request:
    launches = [{**launch, "name": request["launches"][0]["name"]} for launch in request["launches"]]
    return {**request, "launches": launches}


def _transposing(request: Request) -> Request:
    first, *rest = request["launches"]
    return {**request, "launches": [{**first, "attrs": {**first.get("attrs", {}), "transpose": True}}, *rest]}


def _too_many(request: Request) -> Request:
    for index in range(11):
        extra = with_launch({**_stream("eltwise_add", 1024, 128, (8, 1))})(request)
        text = f"{_ALIEN}{index}"
        renamed = {k: {"arg": f"{text}_{k}"} for k in ("a", "b", "out")}
        launch = {**extra["launches"][-1], "name": text, "operands": renamed}
        arguments = [
            {**a, "name": a["name"].replace(_ALIEN, text)} if a["name"].startswith(f"{_ALIEN}_") else a
            for a in extra["arguments"]
        ]
        request = {**extra, "arguments": arguments, "launches": [*request["launches"], launch]}
    return request


def _one_symbol(request: Request) -> Request:
    """Two GEMVs of different depth that name one external symbol."""
    for index, depth in enumerate((512, 1024)):
        launch = {**_gemv(512, depth, 16, 4), "attrs": {"symbol": "matvec"}, "name": f"{_ALIEN}{index}"}
        text = f"{_ALIEN}{index}"
        extra = with_launch(launch)(request)
        renamed = {k: {"arg": f"{text}_{k}"} for k in ("w", "x", "out")}
        arguments = [
            {**a, "name": a["name"].replace(f"{_ALIEN}_", f"{text}_")} for a in extra["arguments"][-3:]
        ]
        request = {
            **request,
            "arguments": [*request["arguments"], *arguments],
            "launches": [*request["launches"], {**extra["launches"][-1], "operands": renamed}],
        }
    return request


FAULTS: tuple[Fault, ...] = (
    _fault(
        "gemm_columns_ragged",
        "A1",
        "GEMM whose N is no multiple of tile_n * herd_n",
        "G3",
        _REGISTRY + "GEMM_bf16_in_bf16_out.md",
        with_launch(_gemm(256, 896, 896, "drain", (32, 128, 32, 128), (8, 4))),
    ),
    _fault(
        "gemv_repeats",
        "A14",
        "GEMV whose input vector repeats 319 times, a queue push allows 255",
        "B2",
        _REGISTRY + "GEMV_bf16.md",
        with_launch(_gemv(2560, 2560, 8, 1)),
    ),
    _fault(
        "descriptor_ids",
        "A15",
        "SiLU-and-Mul with 2048 inner iterations",
        "B10",
        _REGISTRY + "SiLU_Mul_bf16.md",
        with_launch(_stream("silu_mul", 16777216, 1024, (8, 1))),
    ),
    _fault(
        "descriptor_stride",
        "A16",
        "GEMM whose tile_k_l2 * N exceeds a descriptor's stride",
        "B7",
        _REGISTRY + "GEMM_bf16_in_bf16_out.md",
        with_launch(_gemm(256, 3584, 11264, "drain", (32, 256, 32, 64), (8, 4))),
    ),
    _fault(
        "l2_overflow",
        "A17",
        "GEMV tile larger than L2",
        "V3",
        _REGISTRY + "GEMV_bf16.md",
        with_launch(_gemv(4096, 4096, 16, 1)),
    ),
    _fault(
        "l1_overflow",
        "A18",
        "drain GEMM with tile_m 64 and wide tiles",
        "G7",
        _REGISTRY + "GEMM_bf16_in_bf16_out.md",
        with_launch(_gemm(2048, 2048, 2048, "drain", (64, 256, 64, 128), (8, 4))),
    ),
    _fault(
        "shim_channels",
        "A19",
        "element-wise add on 16 cores: two input streams each, 16 channels in all",
        "S1",
        _REGISTRY + "EltwiseAdd_bf16.md",
        with_launch(_stream("eltwise_add", 65536, 1024, (8, 2))),
    ),
    _fault(
        "odd_transfer",
        "A20",
        "GEMV with tile_m 1: a transfer of 2 bytes",
        "B12",
        _REGISTRY + "GEMV_bf16.md",
        with_launch(_gemv(512, 512, 1, 1)),
    ),
    _fault(
        "launch_names_collide",
        "D2",
        "all slices of a stitched program under one prefix",
        "M2",
        _SKILLS + "merge-multi-launch-kernels/SKILL.md",
        _one_name,
        "the name is used twice",
    ),
    _fault(
        "symbols_collide",
        "D3",
        "two GEMVs of different depth call one external symbol",
        "V8",
        _SKILLS + "merge-multi-launch-kernels/SKILL.md",
        _one_symbol,
    ),
    _fault(
        "argument_dangles",
        "D5",
        "an argument that no launch uses",
        "M3",
        _SKILLS + "merge-multi-launch-kernels/SKILL.md",
        _unused_argument,
    ),
    _fault(
        "transposing_dma",
        "D8",
        "a bf16 transfer that transposes",
        "B13",
        "Xilinx/mlir-air e972f2942, programming_examples/llms/qwen3_0_6b/ARCHITECTURE.md",
        _transposing,
    ),
    _fault(
        "too_many_launches",
        "D9",
        "more launches in one ELF than the compiler's stack holds",
        "M6",
        _SKILLS + "merge-multi-launch-kernels/SKILL.md",
        _too_many,
    ),
)
