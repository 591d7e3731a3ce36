"""What runs is what the listing says: real datapaths, edited listings, missing syncs, threads, processes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_twin import injection, pyxrt
from npu_twin.listing import Argument, Launch, Listing, Operand

COMPLETED = pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED


@pytest.fixture
def inputs(bench: Any) -> dict[str, np.ndarray]:
    values = np.linspace(-2, 2, 1024).astype(np.float32)
    exact = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return {"a": bench.bf16(exact), "b": bench.bf16(exact[::-1])}


def test_chain_computes_what_it_says(bench: Any, chain: Listing, inputs: dict[str, np.ndarray]) -> None:
    found = bench.compute(chain, "out", **inputs)
    a, b = bench.f32(inputs["a"]), bench.f32(inputs["b"])
    mid = a + b
    want = mid / (1 + np.exp(-mid)) * b + a
    assert np.allclose(found, want, rtol=0.05, atol=0.05)


EDITS: dict[str, Callable[[tuple[Launch, ...]], tuple[Launch, ...]]] = {
    "without the first": lambda x: x[1:],
    "without the middle": lambda x: (x[0], x[2]),
    "without the last": lambda x: x[:2],
    "first and middle swapped": lambda x: (x[1], x[0], x[2]),
    "last first": lambda x: (x[2], x[0], x[1]),
    "other kernel": lambda x: (
        x[0],
        dataclasses.replace(
            x[1],
            op="eltwise_add",
            operands={"a": Operand("mid"), "b": Operand("b"), "out": Operand("gate")},
            tile={"tile": 128},
        ),
        x[2],
    ),
    "other operand": lambda x: (
        *x[:2],
        dataclasses.replace(x[2], operands={**x[2].operands, "b": Operand("b")}),
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_listing_gives_another_result(
    edit: str, bench: Any, chain: Listing, inputs: dict[str, np.ndarray]
) -> None:
    clean = bench.compute(chain, "out", **inputs)
    other = dataclasses.replace(chain, launches=EDITS[edit](chain.launches))
    found = bench.compute(other, "out", **inputs)
    assert not np.array_equal(found, clean, equal_nan=True)
    if edit.startswith("without") or "first" in edit:
        assert np.isnan(found).any(), "something unwritten was read, the poison must show"


def test_an_edited_file_gives_another_result(
    bench: Any, chain: Listing, inputs: dict[str, np.ndarray]
) -> None:
    """The same through the file itself, as somebody would patch an artefact."""
    clean = bench.compute(chain, "out", **inputs)
    path = Path(bench.path(chain))
    data = json.loads(path.read_text())
    data["launches"][2]["operands"]["b"]["arg"] = "b"
    path.write_text(json.dumps(data))
    kernel = pyxrt.ext.kernel(pyxrt.hw_context(bench.device, pyxrt.elf(str(path))), "chain")
    run = kernel(*(bench.bos[a.name] for a in chain.arguments))
    assert run.wait(1000) == COMPLETED
    assert not np.array_equal(bench.result("out"), clean)


def test_rounding_mode_is_read_from_the_listing(bench: Any, adder: Callable[..., Listing]) -> None:
    listing = adder()
    nearest = dataclasses.replace(listing.launches[0], rounding="nearest_even")
    inputs = {"a": bench.bf16(np.full(1024, 1.0)), "b": bench.bf16(np.full(1024, 3 * 2.0**-9))}
    floor = bench.compute(listing, "out", **inputs)
    other = bench.compute(dataclasses.replace(listing, launches=(nearest,)), "out", **inputs)
    assert (floor == 1.0).all()
    assert (other == 1.0078125).all()


def test_missing_sync_of_an_input_shows(bench: Any, chain: Listing, inputs: dict[str, np.ndarray]) -> None:
    run = bench.run(chain, a=inputs["a"])
    bench.bos["b"].write(inputs["b"], 0)
    run.start()
    assert run.wait(1000) == COMPLETED
    assert np.isnan(bench.result("out")).all()
    bench.bos["b"].sync(bench.to_device)
    run.start()
    run.wait(1000)
    assert not np.isnan(bench.result("out")).any()


def test_missing_sync_of_the_output_shows(bench: Any, chain: Listing, inputs: dict[str, np.ndarray]) -> None:
    run = bench.run(chain, **inputs)
    run.start()
    run.wait(1000)
    out = bench.bos["out"]
    assert np.isnan(bench.f32(out.read(out.size(), 0).view(np.uint16))).all()


def test_stale_input_shows(bench: Any, adder: Callable[..., Listing]) -> None:
    """New data without a sync: the device goes on with the old data."""
    ones, twos = bench.bf16(np.ones(1024)), bench.bf16(np.full(1024, 2.0))
    run = bench.run(adder(), a=ones, b=ones)
    run.start()
    run.wait(1000)
    bench.bos["a"].write(twos, 0)
    run.start()
    run.wait(1000)
    assert (bench.result("out") == 2).all()
    bench.bos["a"].sync(bench.to_device)
    run.start()
    run.wait(1000)
    assert (bench.result("out") == 3).all()


def test_unwritten_output_shows(bench: Any, adder: Callable[..., Listing]) -> None:
    arguments = (
        Argument("a", (1024,)),
        Argument("b", (1024,)),
        Argument("out", (2048,), role="output"),
    )
    operands = {"a": Operand("a"), "b": Operand("b"), "out": Operand("out", 1024, (1024,))}
    launch = dataclasses.replace(adder().launches[0], operands=operands)
    ones = bench.bf16(np.ones(1024))
    found = bench.compute(Listing("half", arguments, (launch,)), "out", a=ones, b=ones)
    assert np.isnan(found[:1024]).all()
    assert (found[1024:] == 2).all()


def gemm(m: int = 64, k: int = 64, n: int = 64) -> Listing:
    arguments = (
        Argument("x", (m, k)),
        Argument("w", (k, n), role="static"),
        Argument("out", (m, n), role="output"),
    )
    launch = Launch(
        "proj",
        "gemm",
        {"M": m, "K": k, "N": n},
        {"a": Operand("x"), "b": Operand("w"), "out": Operand("out")},
        "drain",
        tile={"tile_m": 32, "tile_k_l2": 64, "tile_k_l1": 32, "tile_n": 32},
        herd=(2, 2),
    )
    return Listing("proj", arguments, (launch,))


def test_a_changed_weight_is_seen_after_its_sync(bench: Any) -> None:
    """The quantised copy of a weight is dropped when device memory changes, by a whole or a partial sync."""
    eye = bench.bf16(np.eye(64))
    run = bench.run(gemm(), x=eye, w=eye)
    for scale in (1.0, 2.0):
        bench.bos["w"].write(bench.bf16(np.eye(64) * scale), 0)
        bench.bos["w"].sync(bench.to_device)
        run.start()
        run.wait(1000)
        assert np.array_equal(bench.result("out").reshape(64, 64), np.eye(64) * scale)
    row = bench.bf16(np.eye(64)[:1] * 4)
    bench.bos["w"].write(row, 0)
    bench.bos["w"].sync(bench.to_device, row.nbytes, 0)
    run.start()
    run.wait(1000)
    assert np.diag(bench.result("out").reshape(64, 64)).tolist() == [4.0] + [2.0] * 63


def test_sub_buffers_as_arguments(bench: Any, adder: Callable[..., Listing]) -> None:
    big = pyxrt.ext.bo(bench.device, 3 * 2048)
    big.write(np.concatenate([bench.bf16(np.full(1024, v)) for v in (1.0, 2.0, 0.0)]), 0)
    big.sync(bench.to_device)
    parts = [pyxrt.bo(big, 2048, i * 2048) for i in range(3)]
    run = bench.kernel(adder())(*parts)
    assert run.wait(1000) == COMPLETED
    big.sync(bench.from_device)
    values = bench.f32(big.read(3 * 2048, 0).view(np.uint16))
    assert [values[0], values[1024], values[2048]] == [1.0, 2.0, 3.0]


def test_code_for_the_older_array_leaves_zeros(bench: Any, adder: Callable[..., Listing]) -> None:
    ones = bench.bf16(np.ones(1024))
    assert not bench.compute(adder(target="npu1"), "out", a=ones, b=ones).any()


def test_a_rewritten_listing_is_what_runs(bench: Any, chain: Listing, inputs: dict[str, np.ndarray]) -> None:
    clean = bench.compute(chain, "out", **inputs)
    with injection.rewrite_listing(injection.remove_launch("swiglu"), kernel="chain") as fault:
        broken = bench.compute(chain, "out", **inputs)
    assert fault.hits == 1
    assert np.isnan(broken).all()
    assert np.array_equal(bench.compute(chain, "out", **inputs), clean)
    with (
        injection.rewrite_listing(injection.remove_launch("none")),
        pytest.raises(KeyError, match="has no launch 'none'"),
    ):
        bench.run(chain)


def test_a_corrupted_launch(bench: Any, chain: Listing, inputs: dict[str, np.ndarray]) -> None:
    """Also for a run that was bound before the fault was planted, and healed after it."""

    def zero(launch: Launch, operands: Any) -> None:
        if launch.name == "last":
            operands["out"].u16[...] = 0

    run = bench.run(chain, **inputs)
    results = []
    for faulty in (False, True, False):
        if faulty:
            with injection.corrupt_launch(zero) as fault:
                run.start()
                run.wait(1000)
            assert fault.hits == 3
        else:
            run.start()
            run.wait(1000)
        results.append(bench.result("out"))
    assert not results[1].any()
    assert np.array_equal(results[0], results[2])
    assert results[0].any()


def test_threads_share_the_device(bench: Any, adder: Callable[..., Listing]) -> None:
    """Independent runs from several threads: right results, one clock, no lost time."""
    runs, outputs = [], []
    for i in range(4):
        fill = bench.bf16(np.full(1024, float(i)))
        runs.append(bench.run(adder(f"k{i}"), a=fill, b=fill))
        outputs.append(bench.bos["out"])

    def repeat(index: int) -> None:
        for _ in range(50):
            runs[index].start()
            assert runs[index].wait(60000) == COMPLETED

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(repeat, range(4)))
    for i, out in enumerate(outputs):
        out.sync(bench.from_device)
        assert (bench.f32(out.read(2048, 0).view(np.uint16)) == 2 * i).all()
    assert not bench.npu.queue
    assert bench.npu.clock.now_us() >= bench.npu.busy_until_us


def test_two_processes_are_independent(tmp_path: Path, bench: Any, adder: Callable[..., Listing]) -> None:
    """Two processes at the same time: each has its own device, contexts and clock."""
    path = bench.path(adder())
    code = """
import sys
import numpy as np
from npu_twin import npu2, pyxrt
from npu_twin.clock import default_clock
device = pyxrt.device(0)
contexts = [pyxrt.hw_context(device, pyxrt.elf(sys.argv[1])) for _ in range(npu2.MAX_HW_CONTEXTS)]
bos = [pyxrt.ext.bo(device, 2048) for _ in range(3)]
fill = np.full(1024, int(sys.argv[2]), np.uint16)
for bo in bos[:2]:
    bo.write(fill, 0)
    bo.sync(pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE)
run = pyxrt.ext.kernel(contexts[0], "adder")(*bos)
assert run.wait(1000) == pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
bos[2].sync(pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE)
print(set(bos[2].read(2048, 0).view(np.uint16).tolist()), default_clock().now())
"""
    started = [
        subprocess.Popen([sys.executable, "-c", code, path, str(bits)], stdout=subprocess.PIPE, text=True)
        for bits in (0x3F80, 0x4000)
    ]
    lines = [process.communicate(timeout=120)[0].split() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert [line[0] for line in lines] == ["{16384}", "{16512}"]
    assert lines[0][1] == lines[1][1]
