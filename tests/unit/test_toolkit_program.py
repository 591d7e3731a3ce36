"""Specs, programs and stitching: what they refuse and what they keep."""

from __future__ import annotations

import pytest

from llms.llama_kernel_builder.exceptions import ProgramError
from llms.llama_kernel_builder.program import Buffer, Launch, OperandRef, Program, leaf_program
from llms.llama_kernel_builder.specs import KernelSpec
from llms.llama_kernel_builder.stitch import Part, stitch


def add(n: int = 64) -> KernelSpec:
    return KernelSpec.make("eltwise_add", {"n": n}, "direct", {"tile": 16}, (1, 1))


def chain(argument_map_second: dict[str, str | OperandRef] | None = None, **buffers: Buffer) -> Program:
    """(a + b) + b over three adds' worth of buffers."""
    all_buffers = {
        "a": Buffer("a", (64,)),
        "b": Buffer("b", (64,)),
        "mid": Buffer("mid", (64,), role="intermediate"),
        "out": Buffer("out", (64,), role="output"),
        **buffers,
    }
    leaf = leaf_program("add", add())
    second = argument_map_second or {"a": "mid", "b": "b", "out": "out"}
    return stitch(
        "chain",
        list(all_buffers.values()),
        [Part("first", leaf, {"a": "a", "b": "b", "out": "mid"}), Part("second", leaf, second)],
    )


def test_stitched_program_keeps_order_and_roles() -> None:
    program = chain()
    assert [launch.name for launch in program.launches] == ["first", "second"]
    assert program.indices("intermediate") == (2,)
    assert program.request()["launches"][1]["operands"]["a"] == {"arg": "mid", "shape": [64]}


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"a": "mid", "b": "b"}, "leaves out argument out"),
        ({"a": "mid", "b": "b", "out": "out", "c": "b"}, "names c"),
        ({"a": "mid", "b": "b", "out": "nowhere"}, "unknown buffer 'nowhere'"),
        ({"a": "mid", "b": "b", "out": "mid"}, "two writers"),
    ],
)
def test_stitch_refuses_a_wrong_map(second: dict[str, str | OperandRef], text: str) -> None:
    with pytest.raises(ProgramError, match=text):
        chain(second)


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (Buffer("mid", (32,), role="intermediate"), r"\(64,\), 'mid' gives \(32,\)"),
        (Buffer("mid", (64,), dtype="f32", role="intermediate"), "is bf16, buffer 'mid' is f32"),
        (Buffer("extra", (64,)), "no launch uses argument extra"),
        (Buffer("idle", (64,), role="output"), "no launch uses argument idle"),
        (Buffer("mid", (64,), role="static"), "writes static buffer 'mid'"),
    ],
)
def test_stitch_refuses_a_wrong_buffer(buffer: Buffer, text: str) -> None:
    with pytest.raises(ProgramError, match=text):
        chain(**{buffer.name: buffer})


def test_prefix_used_twice() -> None:
    leaf = leaf_program("add", add())
    part = Part("p", leaf, {"a": "a", "b": "a", "out": "out"})
    with pytest.raises(ProgramError, match="prefix 'p' is used twice"):
        stitch("x", [Buffer("a", (64,)), Buffer("out", (64,), role="output")], [part, part])


def test_reading_before_writing_is_refused() -> None:
    leaf = leaf_program("add", add())
    buffers = [Buffer("a", (64,)), Buffer("m", (64,), role="intermediate"), Buffer("o", (64,), role="output")]
    with pytest.raises(ProgramError, match="reads 'm' before any launch wrote it"):
        stitch(
            "x",
            buffers,
            [
                Part("1", leaf, {"a": "m", "b": "a", "out": "o"}),
                Part("2", leaf, {"a": "a", "b": "a", "out": "m"}),
            ],
        )


def test_parts_of_a_packed_buffer_are_separate_writers() -> None:
    leaf = leaf_program("add", add())
    packed = Buffer("packed", (2, 64), role="output")
    parts = [
        Part(f"row{row}", leaf, {"a": "a", "b": "a", "out": OperandRef("packed", 64 * row, (64,))})
        for row in (0, 1)
    ]
    program = stitch("x", [Buffer("a", (64,)), packed], parts)
    assert program.request()["launches"][1]["operands"]["out"] == {
        "arg": "packed",
        "offset": 64,
        "shape": [64],
    }
    overlap = Part("row1", leaf, {"a": "a", "b": "a", "out": OperandRef("packed", 32, (64,))})
    with pytest.raises(ProgramError, match="two writers"):
        stitch("x", [Buffer("a", (64,)), packed], [parts[0], overlap])


def test_operand_outside_its_buffer() -> None:
    refs = (("a", OperandRef("a", 1, (64,))), ("b", OperandRef("a")), ("out", OperandRef("o")))
    with pytest.raises(ProgramError, match=r"covers elements 1\.\.65 of buffer 'a' with 64"):
        Program("x", (Buffer("a", (64,)), Buffer("o", (64,), role="output")), (Launch("l", add(), refs),))


def test_unknown_op_and_missing_dimension() -> None:
    with pytest.raises(ProgramError, match="unknown kernel op 'conv'"):
        KernelSpec.make("conv", {"n": 1}, "direct")
    with pytest.raises(ProgramError, match="needs dimension 'N'"):
        KernelSpec.make("gemm", {"M": 8, "K": 8}, "drain")


def test_specs_are_equal_whatever_the_order_of_their_tiles() -> None:
    one = KernelSpec.make("gemv", {"M": 8, "K": 64}, "external", {"tile_m": 8, "m_input": 4}, (8, 1))
    two = KernelSpec.make("gemv", {"K": 64, "M": 8}, "external", {"m_input": 4, "tile_m": 8}, (8, 1))
    assert one == two
    assert hash(one) == hash(two)


def test_symbols_separate_what_must_not_share_an_object() -> None:
    base = KernelSpec.make("gemv", {"M": 8, "K": 64}, "external", {"tile_m": 8, "m_input": 4}, (8, 1))
    other_k = KernelSpec.make("gemv", {"M": 8, "K": 128}, "external", {"tile_m": 8, "m_input": 4}, (8, 1))
    other_tile = KernelSpec.make("gemv", {"M": 8, "K": 64}, "external", {"tile_m": 4, "m_input": 4}, (8, 1))
    assert len({base.symbol, other_k.symbol, other_tile.symbol}) == 3


def test_digest_follows_content() -> None:
    program = chain()
    assert program.digest == chain().digest
    wider = stitch(
        "chain",
        [Buffer("a", (64,)), Buffer("o", (64,), role="output")],
        [Part("first", leaf_program("add", add()), {"a": "a", "b": "a", "out": "o"})],
    )
    retiled = KernelSpec.make("eltwise_add", {"n": 64}, "direct", {"tile": 32}, (1, 1))
    other = stitch(
        "chain",
        [Buffer("a", (64,)), Buffer("o", (64,), role="output")],
        [Part("first", leaf_program("add", retiled), {"a": "a", "b": "a", "out": "o"})],
    )
    assert len({program.digest, wider.digest, other.digest}) == 3


def test_fused_cast_has_a_scratch_operand() -> None:
    spec = KernelSpec.make("gemm", {"M": 64, "K": 64, "N": 64}, "fused-cast")
    leaf = leaf_program("g", spec)
    scratch = leaf.buffers[leaf.index["scratch"]]
    assert (scratch.dtype, scratch.role, scratch.shape) == ("f32", "intermediate", (64, 64))
