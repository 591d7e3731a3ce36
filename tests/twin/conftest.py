"""Fixtures of the twin's own tests: a fresh device per test and a bench to run listings on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_twin import executor, pyxrt
from npu_twin.clock import VirtualClock
from npu_twin.listing import Argument, Launch, Listing, Operand

TO_DEVICE = pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE
FROM_DEVICE = pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE


def bf16(values: Any) -> np.ndarray:
    """bf16 bits of values that bf16 holds exactly."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "test values must be exact in bf16"
    return (bits >> 16).astype(np.uint16)


def f32(bits: np.ndarray) -> np.ndarray:
    """float32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Bench:
    """Loads listings and keeps their buffers, the way a host runtime does."""

    to_device = TO_DEVICE
    from_device = FROM_DEVICE
    bf16 = staticmethod(bf16)
    f32 = staticmethod(f32)

    def __init__(self, folder: Path, npu: executor.Device) -> None:
        self.folder = folder
        self.npu = npu
        self.device = pyxrt.device(0)
        self.bos: dict[str, Any] = {}
        self.kept: list[Any] = []

    def path(self, listing: Listing) -> str:
        path = self.folder / f"{listing.name}.elf"
        path.write_text(listing.to_json())
        return str(path)

    def kernel(self, listing: Listing) -> Any:
        context = pyxrt.hw_context(self.device, pyxrt.elf(self.path(listing)))
        return pyxrt.ext.kernel(context, listing.name)

    def run(self, listing: Listing, **inputs: np.ndarray) -> Any:
        """A run with every argument set, the given ones written and synced."""
        made = pyxrt.run(self.kernel(listing))
        for index, argument in enumerate(listing.arguments):
            bo = self.bos[argument.name] = pyxrt.ext.bo(self.device, argument.nbytes)
            if argument.name in inputs:
                bo.write(inputs[argument.name], 0)
                bo.sync(TO_DEVICE)
            made.set_arg(index, bo)
            self.kept.append(bo)
        return made

    def result(self, name: str) -> np.ndarray:
        """float32 values of a bf16 buffer after a sync from the device."""
        self.bos[name].sync(FROM_DEVICE)
        return f32(self.bos[name].read(self.bos[name].size(), 0).view(np.uint16))

    def compute(self, listing: Listing, output: str, **inputs: np.ndarray) -> np.ndarray:
        run = self.run(listing, **inputs)
        run.start()
        assert run.wait(1000) == pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
        return self.result(output)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> executor.Device:
    """A device of its own for the test, with its clock at zero."""
    device = executor.Device(clock=VirtualClock())
    monkeypatch.setattr(executor, "_device", device)
    return device


@pytest.fixture
def bench(tmp_path: Path, npu: executor.Device) -> Bench:
    return Bench(tmp_path, npu)


def add(name: str, a: str, b: str, out: str, n: int = 1024) -> Launch:
    operands = {"a": Operand(a), "b": Operand(b), "out": Operand(out)}
    return Launch(name, "eltwise_add", {"n": n}, operands, tile={"tile": 128}, herd=(8, 1))


@pytest.fixture
def adder() -> Callable[..., Listing]:
    """out = a + b, one launch."""

    def make(name: str = "adder", n: int = 1024, **changes: Any) -> Listing:
        arguments = (Argument("a", (n,)), Argument("b", (n,)), Argument("out", (n,), role="output"))
        return Listing(name, arguments, (add("sum", "a", "b", "out", n),), **changes)

    return make


@pytest.fixture
def chain() -> Listing:
    """mid = a + b, gate = silu(mid) * b, out = gate + a: three launches, the order matters."""
    n = 1024
    arguments = (
        Argument("a", (n,)),
        Argument("b", (n,)),
        Argument("mid", (n,), role="intermediate"),
        Argument("gate", (n,), role="intermediate"),
        Argument("out", (n,), role="output"),
    )
    swiglu = Launch(
        "swiglu",
        "silu_mul",
        {"n": n},
        {"gate": Operand("mid"), "up": Operand("b"), "out": Operand("gate")},
        tile={"tile_n": 128},
        herd=(8, 1),
    )
    return Listing(
        "chain", arguments, (add("first", "a", "b", "mid"), swiglu, add("last", "gate", "a", "out"))
    )
