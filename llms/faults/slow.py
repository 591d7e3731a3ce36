"""Faults of time: right numbers, too late, or an optimisation that isn't one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import llms.llama_kernel_builder.deployment.session as session_module
from llms.faults.seams import SKILLS, decode, fault, prefill
from llms.llama_kernel_builder.block_runner import BlockRunner
from npu_twin import injection
from npu_twin.clock import default_clock
from npu_twin.faults._types import Fault, Plant

_MERGE = SKILLS + "merge-multi-launch-kernels/SKILL.md"
_DECODE = SKILLS + "decode-optimization/SKILL.md"
_GEMM = "Xilinx/mlir-air e972f2942, programming_examples/kernel_registry/details/GEMM_bf16_in_bf16_out.md"


def _old_path() -> Plant:
    """Whoever asks for merged blocks is given one ELF per kernel all the same."""
    return mock.patch.object(
        session_module, "BlockRunner", lambda cache, **_: BlockRunner(cache, merged=False)
    )


def _late(seam: Callable[..., Plant], ms: float) -> Plant:
    """Work of the host that nobody declares takes ``ms`` in every call."""

    def change(right: Any, *arguments: Any) -> Any:
        default_clock().advance_us(ms * 1e3)
        return right(*arguments)

    return seam(change)


FAULTS: tuple[Fault, ...] = (
    fault(
        "old_path_called", "merged ELFs are built, the unmerged ones are called", _old_path, _MERGE, "D10",
        kind="slow", expected="phase4",
    ),
    fault(
        "merged_decode_slow", "a merged ELF of decode is slower than its kernels alone",
        lambda: injection.delay(5e3, kernel="o_gemv_ffn"), _MERGE, "D11", kind="slow", expected="phase5",
    ),
    fault(
        "slow_tile", "a tile that makes the largest ELF of a prompt take 50 ms more",
        lambda: injection.delay(5e4, kernel="o_ffn_s128"), _GEMM, "A23", kind="slow", expected="phase7",
    ),
    fault(
        "set_up_in_prefill", "set-up of 200 ms inside the timed prefill", lambda: _late(prefill, 200.0),
        _DECODE, "E27", kind="slow", expected="phase7",
    ),
    fault(
        "host_work_untimed", "host work of 50 ms per decode step that no profile shows",
        lambda: _late(decode, 50.0), _DECODE, "E28", kind="slow", expected="phase7",
    ),
)  # fmt: skip
