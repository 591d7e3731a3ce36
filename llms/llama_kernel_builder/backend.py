"""Options of the compiler's back end for one ELF. They hold for the whole module, so all launches share them.

Each has its reason in a rule of mlir-air e972f2942, named beside it; `npu_twin.constraints` states the rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .specs import KernelSpec

# Memory of one core and the part of it that the stack takes, in bytes (aie-rt, AIE2P).
L1_BYTES = 64 * 1024
STACK_BYTES = 1024
# GEMVs from this K on run with single buffers in every published model (rule V5).
SINGLE_BUFFER_K = 8192
# The launch loop is tiled by 4 in the standalone harness and by 16 in the ELFs of the models (rule B3).
STANDALONE_TILING = 4
MODEL_TILING = 16
# Dimensions of a launch. Attention with chunks of the value dimension has one more (rule F15).
LAUNCH_RANK = 2
CHUNKED_RANK = 3


@dataclass(frozen=True)
class BackendOptions:
    """What the back end is told beside the module.

    output_format: `elf` or `xclbin`; a fused-cast GEMM is right only as ELF (rule G13).
    ping_pong: two copies of every L1 buffer, or one for the whole module (rules M7, V4, V5).
    omit_while_true_loop: attention hangs without the endless loop (rule F13).
    runtime_loop_tiling_sizes: factors that split the launch loops, one per dimension (rules B3, F15).
    bf16_emulation: bf16 products in the block format; native ones have another accumulator (rule G19).
    target: code of another array generation returns zeros (rule D8).
    The instance name is no option: it is the program's name (rule M11).
    """

    output_format: str = "elf"
    ping_pong: bool = True
    omit_while_true_loop: bool = False
    runtime_loop_tiling_sizes: tuple[int, ...] = (MODEL_TILING,) * LAUNCH_RANK
    bf16_emulation: bool = True
    target: str = "npu2"

    def request(self) -> dict[str, Any]:
        """JSON-able form."""
        data = asdict(self)
        data["runtime_loop_tiling_sizes"] = list(self.runtime_loop_tiling_sizes)
        return data


def options_of(specs: Iterable[KernelSpec], *, tiling: int = MODEL_TILING) -> BackendOptions:
    """The options that these launches of one module need together."""
    launched = list(specs)
    rank = CHUNKED_RANK if any(_chunked(spec) for spec in launched) else LAUNCH_RANK
    return BackendOptions(
        ping_pong=all(fits_twice(spec) for spec in launched),
        runtime_loop_tiling_sizes=(tiling,) * rank,
    )


def fits_twice(spec: KernelSpec) -> bool:
    """Whether a launch leaves room for two copies of its L1 buffers; only a GEMV's K decides about it."""
    if spec.op not in ("gemv", "gemv_add"):
        return True
    depth, tile = spec.dim("K"), dict(spec.tile)
    if depth >= SINGLE_BUFFER_K:
        return False
    rows, step = tile.get("tile_m", 0), tile.get("m_input", 0)
    copies = 2 if rows > step else 1
    return copies * 2 * step * depth + 2 * depth + 2 * rows + STACK_BYTES <= L1_BYTES


def _chunked(spec: KernelSpec) -> bool:
    if spec.op != "flash_attention":
        return False
    width = spec.dim("head_dim")
    return dict(spec.tile).get("dv_tile", width) < width
