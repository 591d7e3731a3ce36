"""Computing a launch of a listing: on device memory, or on host arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from npu_twin.bf16 import bits_to_host, host_to_bits
from npu_twin.datapath.arithmetic import current_arithmetic
from npu_twin.listing import Launch, Operand
from npu_twin.memory import ITEMSIZE, DeviceMemory, OperandView
from npu_twin.ops import OPS


def prepare(launch: Launch, operands: Mapping[str, OperandView]) -> Callable[[], None]:
    """Bind ``launch`` to its operands and return the closure that computes its outputs in place.

    Called once per binding; the closure is then called for each run and reads the memory as it is at that
    time. The choices of :func:`npu_twin.datapath.arithmetic` in force now are built into it. Closures share
    scratch memory: one may run at a time per process.

    Raises ValueError when an operand is missing or has another shape or type than the launch needs, or when
    the operation cannot be computed with these dimensions.
    """
    signature = launch.signature()
    for name, spec in signature.items():
        view = operands.get(name)
        if view is None:
            raise ValueError(f"launch {launch.name} ({launch.op}): operand {name} is missing")
        if view.shape != spec.shape or view.dtype != spec.dtype:
            raise ValueError(
                f"launch {launch.name} ({launch.op}): operand {name} must be {spec.dtype}{list(spec.shape)}, "
                f"got {view.dtype}{list(view.shape)}"
            )
    return OPS[launch.op].prepare(launch, operands, current_arithmetic())


def standalone_launch(
    op: str,
    dims: Mapping[str, int],
    *,
    method: str = "default",
    tile: Mapping[str, int] | None = None,
    attrs: Mapping[str, Any] | None = None,
    herd: tuple[int, int] = (1, 1),
    rounding: str = "",
) -> Launch:
    """A launch on its own, each operand being an argument of the same name: for tests, sweeps and tools."""
    signature = OPS[op].signature(dims, method, tile or {}) if op in OPS else {}
    return Launch(
        name=op,
        op=op,
        dims=dims,
        operands={name: Operand(name) for name in signature},
        method=method,
        attrs=attrs or {},
        tile=tile or {},
        herd=herd,
        rounding=rounding,
    )


def run_launch(launch: Launch, inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Run one launch on host arrays and return what it writes, by operand name.

    ``inputs`` holds every operand that the launch reads: ``ml_dtypes.bfloat16`` (or its uint16 bits) for
    bf16, ``float32`` for f32, in any contiguous shape with the right number of elements. Outputs have the
    operand's shape, as ``ml_dtypes.bfloat16`` or ``float32``. Raises ValueError or TypeError naming the
    operand.
    """
    views: dict[str, OperandView] = {}
    written: list[str] = []
    signature = launch.signature()
    if unknown := set(inputs) - {name for name, spec in signature.items() if spec.access == "read"}:
        raise ValueError(f"launch {launch.name} ({launch.op}) does not read {', '.join(sorted(unknown))}")
    for name, spec in signature.items():
        nbytes = int(np.prod(spec.shape)) * ITEMSIZE[spec.dtype]
        view = views[name] = DeviceMemory(nbytes).view(0, spec.shape, spec.dtype)
        if spec.access == "write":
            written.append(name)
            continue
        if name not in inputs:
            raise ValueError(f"launch {launch.name} ({launch.op}) reads {name}, which was not given")
        array = np.asarray(inputs[name])
        if array.size != view.array.size:
            raise ValueError(
                f"launch {launch.name} ({launch.op}): {name} needs shape {list(spec.shape)}, "
                f"got {list(array.shape)}"
            )
        if spec.dtype == "bf16":
            view.u16[...] = host_to_bits(array).reshape(spec.shape)
        else:
            view.f32[...] = array.reshape(spec.shape)
        view.memory.changed()
    run = prepare(launch, views)
    with np.errstate(all="ignore"):
        run()
    return {
        name: bits_to_host(views[name].u16) if views[name].dtype == "bf16" else views[name].f32.copy()
        for name in written
    }
