"""The physical parameters of the timing model: name, value, unit, meaning and where the value comes from.

Values live in `npu_twin/data/timing_parameters.json`, which `python -m tools.twin_calibration` writes; what a
parameter means is defined here. The formulas take a plain mapping from name to value, so that a fit can vary
it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from npu_twin.opset import Values

DATA_FILE = Path(__file__).resolve().parent.parent / "data" / "timing_parameters.json"

ROWS = "fitted on published rows"
MODELS = "fitted on published model figures"
PROFILE = "read from a published profile"


@dataclass(frozen=True)
class Parameter:
    """One physical constant.

    Attributes:
        name: key in the formulas.
        start: value from which a fit starts, and the value of a constant that is not fitted.
        unit: physical unit.
        meaning: what it stands for on the device or on the host.
        provenance: how the value was obtained.
    """

    name: str
    start: float
    unit: str
    meaning: str
    provenance: str = ROWS

    @property
    def group(self) -> str:
        """The kernel or part of the system that the parameter belongs to."""
        return self.name.split(".", 1)[0]


DEFINITIONS: tuple[Parameter, ...] = (
    # program: what starting costs
    Parameter("program.start_us", 62.0, "us", "run of a program without work, from start to completion"),
    Parameter("program.reload_us", 30.0, "us", "loading a launch of a program, whatever its size"),
    Parameter("program.reload_us_per_tile", 8.5, "us", "loading one more compute tile of a launch"),
    Parameter(
        "program.context_switch_us",
        155.0,
        "us",
        "changing to the hardware context of another program",
        PROFILE,
    ),
    Parameter(
        "program.alternating_ratio",
        1.4,
        "1",
        "work while ELF and xclbin contexts alternate in a process, over work alone (published: 1.4 to 2.5)",
        PROFILE,
    ),
    Parameter(
        "program.one_row_load_ratio",
        0.6,
        "1",
        "loading a launch of a program of one row over loading as many tiles of a prefill launch",
        MODELS,
    ),
    # GEMM
    Parameter("gemm.ddr_gbps", 48.0, "GB/s", "DDR to array and back, all columns together"),
    Parameter(
        "gemm.block_edge",
        46.0,
        "elements of K",
        "what one change of the L2 block costs, as extra columns of it",
    ),
    Parameter(
        "gemm.restart_us",
        28.0,
        "us",
        "drained pipe when all columns go on to the next columns of B; other row blocks in flight hide it",
    ),
    Parameter("gemm.call_ns", 520.0, "ns", "one call of the external micro kernel, whatever its size"),
    Parameter("gemm.ns_per_kmac", 4.3, "ns", "1000 multiply-adds in the external micro kernel"),
    Parameter("gemm.direct_call_ns", 640.0, "ns", "one call of the compiler's own micro kernel"),
    Parameter("gemm.direct_ns_per_kmac", 8.1, "ns", "1000 multiply-adds in the compiler's own micro kernel"),
    Parameter("gemm.direct_round_ns", 0.024, "ns", "rounding one element of the tile to bf16, every call"),
    Parameter(
        "gemm.store_ns", 1.5, "ns", "casting or copying one accumulator on its core; nothing overlaps it"
    ),
    # GEMV
    Parameter("gemv.fill_us", 9.0, "us", "first data of a GEMV on their way, nothing computed yet"),
    Parameter("gemv.ddr_gbps", 35.6, "GB/s", "weights from DDR, sustained over many descriptor groups"),
    Parameter("gemv.burst_gbps", 51.8, "GB/s", "weights from DDR within one descriptor group"),
    Parameter("gemv.group_us", 9.8, "us", "refilling the pipe between two descriptor groups"),
    Parameter(
        "gemv.pingpong_gbps", 41.0, "GB/s", "weights from DDR with double buffers, as inside programs", MODELS
    ),
    # streaming kernels
    Parameter("stream.fill_us", 25.0, "us", "first data of an element-wise kernel on their way"),
    Parameter("stream.ddr_gbps", 71.0, "GB/s", "operands from and to DDR, all columns together"),
    Parameter("stream.add_ns", 0.6, "ns", "one element of an addition on one core"),
    Parameter("stream.bias_ns", 0.72, "ns", "one element of a broadcast addition on one core"),
    Parameter("stream.silu_mul_ns", 1.9, "ns", "one element of SiLU and multiply on one core"),
    Parameter("stream.gelu_ns", 2.2, "ns", "one element of GELU on one core"),
    Parameter("rope.fill_us", 25.0, "us", "first data of a RoPE on their way"),
    Parameter("rope.row_ns", 29.0, "ns", "descriptors of one row on one core"),
    Parameter("rope.element_ns", 0.51, "ns", "one element of a row on one core"),
    Parameter("norm.fill_us", 40.0, "us", "first data of a norm on their way, weights included"),
    Parameter("norm.rms_ns", 1.18, "ns", "one element of RMSNorm on one core"),
    Parameter("norm.layer_ns", 2.35, "ns", "one element of LayerNorm on one core"),
    # attention
    Parameter("attention.load_us", 550.0, "us", "loading attention: all tiles, channels and the cascade"),
    Parameter("attention.block_us", 33.0, "us", "fill and drain of the cascade for one block of queries"),
    Parameter("attention.mask_us", 10.0, "us", "causal mask on the diagonal of one block of queries"),
    Parameter("attention.softmax_ns", 8.7, "ns", "one key column in the softmax of one block of queries"),
    Parameter("attention.product_ns", 26.8, "ns", "one key column in both products, per 128 columns of head"),
    # host and driver
    Parameter("host.write_gbps", 16.0, "GB/s", "host copy and sync of a buffer to the device", PROFILE),
    Parameter(
        "host.sync_us", 3.0, "us", "sync of one buffer in either direction, whatever its size", PROFILE
    ),
    Parameter("host.read_gbps", 120.0, "GB/s", "sync of a buffer from the device", PROFILE),
    Parameter(
        "host.dispatch_us", 20.0, "us", "driver and interpreter time of one call of a program", PROFILE
    ),
    Parameter("host.copy_gbps", 3.0, "GB/s", "conversion and copying of an array in the interpreter", MODELS),
    Parameter("host.transpose_gbps", 6.3, "GB/s", "head-first transposes of attention operands", PROFILE),
    Parameter(
        "host.attention_us", 280.0, "us", "attention of one decode step on the CPU, per layer", PROFILE
    ),
    Parameter(
        "host.glue_us", 90.0, "us", "addition, norm and SwiGLU of one row on the CPU, per layer", PROFILE
    ),
    Parameter("host.tokenize_us", 10.0e3, "us", "tokenising a prompt", PROFILE),
    Parameter("host.embed_gbps", 2.9, "GB/s", "embedding lookup, bytes read and written", PROFILE),
    Parameter("host.kv_extract_gbps", 7.6, "GB/s", "taking keys and values into the cache", PROFILE),
    Parameter("host.norm_us", 70.0, "us", "final RMSNorm of one row", PROFILE),
    Parameter("host.flops_per_us", 2.0e4, "1/us", "operations of the CPU in small array kernels", PROFILE),
    Parameter(
        "model.program_ratio", 1.04, "1", "time of a prefill program over the sum of its launches", MODELS
    ),
    Parameter(
        "model.attention_ratio", 1.25, "1", "attention between other programs over attention alone", MODELS
    ),
    Parameter("power.idle_limit_s", 10.0, "s", "time without work after which the device sleeps", PROFILE),
    Parameter("power.wake_us", 150.0e3, "us", "what the first run after that pays", PROFILE),
)


def starts() -> dict[str, float]:
    """Return the starting value of every parameter."""
    return {p.name: p.start for p in DEFINITIONS}


def definition(name: str) -> Parameter:
    """Return the definition of the parameter `name`. Raises KeyError for an unknown name."""
    for parameter in DEFINITIONS:
        if parameter.name == name:
            return parameter
    raise KeyError(f"no timing parameter {name!r}")


def read_file(path: Path = DATA_FILE) -> dict[str, Any]:
    """Return the content of the parameter file.

    Raises:
        ValueError: naming the file when it is not JSON of the expected form.
        OSError: when it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        {str(p["name"]): float(p["value"]) for p in content["parameters"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a timing parameter file ({error!r}); run python -m tools.twin_calibration"
        ) from None
    return dict(content)


@lru_cache(maxsize=1)
def current() -> Values:
    """Return name and value of every parameter, as fitted; read once per process."""
    values = starts()
    values.update({str(p["name"]): float(p["value"]) for p in read_file()["parameters"]})
    return values
