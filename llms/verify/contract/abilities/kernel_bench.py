"""Ability `kernel_bench`: single kernels of a deployment (phase 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from llms.verify.contract.kernel_case import KernelCase
from llms.verify.contract.records import Array


class KernelBench(Protocol):
    """Runs single kernels of a deployment (phase 1).

    An adapter offers it as ``kernel_bench(folder) -> KernelBench``, ``folder`` being the Hugging Face folder
    whose ``config.json`` counts, or None for the published configuration. It is asked while tests are
    collected: weights, network and device are out of reach, and heavy imports are unwelcome.
    """

    def cases(self) -> Sequence[KernelCase]:
        """Every kernel that prefill at any compiled length, decode and the LM head launch, each once."""

    def prepare(self, case: KernelCase) -> None:
        """Compile what a case needs; the device is not touched."""

    def run(self, case: KernelCase, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Launch a case once on the device; ``out`` of the result is its whole output.

        ``inputs`` by operand name, bf16, as :func:`llms.verify.reference.kernels.make_inputs` makes them.
        """
