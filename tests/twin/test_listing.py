"""Program listings: round trip, immutability, and a clear error for each way to be wrong."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from npu_twin.exceptions import ListingError
from npu_twin.listing import Argument, Launch, Listing, Operand, default_rounding


def gemm(method: str = "fused-cast", **changes: Any) -> dict[str, Any]:
    data = {
        "format": "npu2-program-listing",
        "version": 1,
        "target": "npu2",
        "name": "proj",
        "arguments": [
            {"name": "x", "shape": [32, 64], "dtype": "bf16", "role": "input"},
            {"name": "w", "shape": [64, 48], "dtype": "bf16", "role": "static"},
            {"name": "q", "shape": [32, 48], "dtype": "bf16", "role": "output"},
            {"name": "acc", "shape": [32, 48], "dtype": "f32", "role": "intermediate"},
        ],
        "launches": [
            {
                "name": "q_gemm",
                "op": "gemm",
                "method": method,
                "dims": {"M": 32, "K": 64, "N": 48},
                "attrs": {},
                "tile": {"tile_m": 16, "tile_k_l2": 64, "tile_k_l1": 32, "tile_n": 16},
                "herd": [2, 1],
                "rounding": "nearest_even",
                "operands": {
                    "a": {"arg": "x"},
                    "b": {"arg": "w"},
                    "out": {"arg": "q", "offset": 0, "shape": [32, 48]},
                    "scratch": {"arg": "acc"},
                },
            }
        ],
    }
    data.update(changes)
    return data


def edited(path: str, value: Any) -> str:
    """The gemm listing as text, with the value at a dotted path replaced (None: removed)."""
    data = gemm()
    at: Any = data
    *parents, last = path.split(".")
    for step in parents:
        at = at[int(step)] if isinstance(at, list) else at[step]
    if isinstance(at, list):
        at[int(last)] = value
    elif value is None:
        del at[last]
    else:
        at[last] = value
    return json.dumps(data)


def test_round_trip_is_exact_and_stable() -> None:
    listing = Listing.from_json(json.dumps(gemm()))
    assert Listing.from_json(listing.to_json()) == listing
    assert Listing.from_json(listing.to_json()).to_json() == listing.to_json()
    assert hash(pickle.loads(pickle.dumps(listing))) == hash(listing)
    assert listing.launches[0].dims["K"] == 64
    assert listing.argument("acc").nbytes == 32 * 48 * 4


def test_text_does_not_depend_on_the_order_of_construction() -> None:
    one = Listing.from_json(json.dumps(gemm()))
    shuffled = gemm()
    shuffled["launches"][0]["operands"] = dict(reversed(shuffled["launches"][0]["operands"].items()))
    shuffled["launches"][0]["dims"] = {"N": 48, "M": 32, "K": 64}
    assert Listing.from_json(json.dumps(shuffled)).to_json() == one.to_json()


def test_immutable() -> None:
    listing = Listing.from_json(json.dumps(gemm()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        listing.name = "other"  # type: ignore[misc]
    for change in (lambda d: d.update(M=1), lambda d: d.pop("M"), lambda d: d.__setitem__("M", 1)):
        with pytest.raises(TypeError, match="immutable"):
            change(listing.launches[0].dims)


def test_rounding_defaults_follow_the_core() -> None:
    assert {
        op: default_rounding(op) for op in ("gemm", "gemv", "gemv_add", "flash_attention")
    } == dict.fromkeys(("gemm", "gemv", "gemv_add", "flash_attention"), "nearest_even")
    assert default_rounding("rms_norm") == default_rounding("rope") == default_rounding("silu_mul") == "floor"
    listing = Listing.from_json(edited("launches.0.rounding", None))
    assert listing.launches[0].rounding == "nearest_even"
    with pytest.raises(ListingError, match="unknown operation 'conv'"):
        default_rounding("conv")


WRONG = {
    "format": ("format", "elf", "'elf' cannot be read here"),
    "version": ("version", 2, "compile it again"),
    "no target": ("target", None, "no target"),
    "name": ("name", "a b", "is not a name"),
    "unknown field": ("extra", 1, "unknown extra"),
    "arguments no list": ("arguments", {}, "must be a list"),
    "no arguments": ("arguments", [], "at least one argument"),
    "argument field": ("arguments.0.size", 3, r"arguments\[0\]: unknown size"),
    "shape zero": ("arguments.0.shape", [32, 0], r"x.shape\[1\]: must be an integer of at least 1"),
    "shape bool": ("arguments.0.shape", [True], "integer"),
    "shape empty": ("arguments.0.shape", [], "non-empty list"),
    "dtype": ("arguments.0.dtype", "f16", "'f16' is not one of bf16, f32"),
    "role": ("arguments.0.role", "weights", "is not one of input, static"),
    "argument twice": ("arguments.1.name", "x", "x: the name is used twice"),
    "op": ("launches.0.op", "conv", "unknown operation 'conv'"),
    "method": ("launches.0.method", "quick", "gemm has no method 'quick'; it has drain"),
    "dims missing": ("launches.0.dims", {"M": 32, "K": 64}, "needs the dimensions M, K, N"),
    "dims negative": ("launches.0.dims.M", -1, "at least 1"),
    "tile": ("launches.0.tile.tile_m", 1.5, "must be an integer"),
    "herd": ("launches.0.herd", [1], "two integers"),
    "rounding": ("launches.0.rounding", "up", "'up' is not one of floor, nearest_even"),
    "operand missing": ("launches.0.operands.scratch", None, "needs the operands a, b, out, scratch"),
    "operand unknown": ("launches.0.operands.c", {"arg": "x"}, "needs the operands a, b, out, scratch, got"),
    "operand arg": ("launches.0.operands.a.arg", "y", "no argument 'y'; the program has x, w, q, acc"),
    "operand field": ("launches.0.operands.a.stride", 2, "unknown stride"),
    "operand dtype": ("launches.0.operands.scratch.arg", "q", "needs f32 here, argument q is bf16"),
    "operand shape": (
        "launches.0.operands.a.shape",
        [64, 32],
        r"needs shape \[32, 64\] here, got \[64, 32\]",
    ),
    "operand range": ("launches.0.operands.a.offset", 1, "elements 1..2048 are outside of argument x"),
    "operand offset": ("launches.0.operands.a.offset", -1, "at least 0"),
    "overlap": ("launches.0.operands.out.arg", "w", "needs shape|overlaps|outside"),
    "launch no object": ("launches.0", 3, "must be an object"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_listing_names_the_place(case: str) -> None:
    path, value, message = WRONG[case]
    with pytest.raises(ListingError, match=message):
        Listing.from_json(edited(path, value))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x7fELF"])
def test_not_a_listing(text: str) -> None:
    with pytest.raises(ListingError):
        Listing.from_json(text)


def test_operand_written_over_one_that_is_read() -> None:
    launch = {"a": Operand("x"), "b": Operand("y"), "out": Operand("x")}
    arguments = (Argument("x", (16,)), Argument("y", (16,)))
    with pytest.raises(ListingError, match="overlaps with operand a"):
        Listing("p", arguments, (Launch("s", "eltwise_add", {"n": 16}, launch),))


def test_part_of_an_argument_and_another_shape() -> None:
    """Row 0 of a packed buffer, and the same bytes under another shape, are legal operands."""
    packed = Argument("packed", (2, 64))
    out = Argument("out", (4, 16), role="output")
    operands = {
        "x": Operand("packed", shape=(4, 16)),
        "w": Operand("packed", offset=64, shape=(16,)),
        "out": Operand("out"),
    }
    listing = Listing("p", (packed, out), (Launch("n", "rms_norm", {"M": 4, "N": 16}, operands, "weighted"),))
    assert Listing.from_json(listing.to_json()) == listing


def test_dataflow(chain: Listing) -> None:
    assert chain.dataflow_problems() == []
    without_first = dataclasses.replace(chain, launches=chain.launches[1:])
    [(launch, text)] = without_first.dataflow_problems()
    assert launch == "swiglu"
    assert "element 0 of mid" in text
    without_last = dataclasses.replace(chain, launches=chain.launches[:-1])
    assert without_last.dataflow_problems() == [(None, "no launch writes element 0 of output out")]
    swapped = dataclasses.replace(chain, launches=(chain.launches[1], chain.launches[0], chain.launches[2]))
    assert [launch for launch, _ in swapped.dataflow_problems()] == ["swiglu"]


def test_dataflow_finds_the_unwritten_half(adder: Callable[..., Listing]) -> None:
    arguments = (Argument("a", (16,)), Argument("b", (16,)), Argument("out", (32,), role="output"))
    operands = {"a": Operand("a"), "b": Operand("b"), "out": Operand("out", 0, (16,))}
    listing = Listing("half", arguments, (Launch("s", "eltwise_add", {"n": 16}, operands),))
    assert listing.dataflow_problems() == [(None, "no launch writes element 16 of output out")]
