"""Faults of time: right numbers, too late, or an optimisation that isn't one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import llms.llama_kernel_builder.deployment.session as session_module
from llms.faults.seams import decode, prefill
from llms.llama_kernel_builder.block_runner import BlockRunner
from npu_twin import injection
from npu_twin.clock import default_clock
from npu_twin.faults._types import Fault, Plant

_SKILLS = "Xilinx/mlir-air e972f2942, .claude/skills/"
_MERGE = _SKILLS + "merge-multi-launch-kernels/SKILL.md"
_GEMM = "Xilinx/mlir-air e972f2942, programming_examples/kernel_registry/details/GEMM_bf16_in_bf16_out.md"


def _old_path() -> Plant:
    """Whoever asks for merged blocks is given one ELF per kernel all the same."""
    return mock.patch.object(
        session_module, "BlockRunner", lambda cache, **_: BlockRunner(cache, merged=False)
    )


def _slow_elf(kernel: str, us: float) -> Plant:
    return injection.delay(us, kernel=kernel)


def _late(seam: Any, ms: float) -> Plant:
    """Work of the host that nobody declares takes ``ms`` in every call."""

    def change(right: Any, *arguments: Any) -> Any:
        default_clock().advance_us(ms * 1e3)
        return right(*arguments)

    found: Plant = seam(change)
    return found


def _fault(entry: str, name: str, what: str, origin: str, expected: str, plant: Any) -> Fault:
    return Fault(name, "slow", what, origin, expected, plant, entry)


FAULTS: tuple[Fault, ...] = (
    _fault(
        "D10",
        "old_path_called",
        "merged ELFs are built, the unmerged ones are called",
        _MERGE,
        "phase4",
        _old_path,
    ),
    _fault(
        "D11",
        "merged_decode_slow",
        "a merged ELF of decode is slower than its kernels alone",
        _MERGE,
        "phase5",
        lambda: _slow_elf("o_gemv_ffn", 5e3),
    ),
    _fault(
        "A23",
        "slow_tile",
        "a tile that makes the largest ELF of a prompt take 50 ms more",
        _GEMM,
        "phase7",
        lambda: _slow_elf("o_ffn_s128", 5e4),
    ),
    _fault(
        "E27",
        "set_up_in_prefill",
        "set-up of 200 ms inside the timed prefill",
        _SKILLS + "decode-optimization/SKILL.md",
        "phase7",
        lambda: _late(prefill, 200.0),
    ),
    _fault(
        "E28",
        "host_work_untimed",
        "host work of 50 ms per decode step that no profile shows",
        _SKILLS + "decode-optimization/SKILL.md",
        "phase7",
        lambda: _late(decode, 50.0),
    ),
)
