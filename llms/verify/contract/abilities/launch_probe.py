"""Ability `launch_probe`: single launches as they run (the bisect)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from llms.verify.contract.launches import ElfRun, KernelCall, LayeredWeights, ModelSizes
from llms.verify.contract.records import Array


class LaunchTap(Protocol):
    """Collects the runs of ELFs while it is open."""

    def take(self) -> Sequence[ElfRun]:
        """The runs since the last time, in order."""


class DeviceLayout(Protocol):
    """How the device lays out a model: padded widths, and where the real columns lie in them.

    Padding lies behind all real columns, but in Q, K and V, where every head has its own.
    """

    @property
    def sizes(self) -> ModelSizes:
        """Sizes as padded; columns that were added are zero."""

    def head_columns(self, heads: int) -> Array:
        """int[heads * head_dim]: padded column of every real column of ``heads`` heads of Q, K or V."""

    def weights(self, weights: LayeredWeights) -> LayeredWeights:
        """The same weights as the device has them."""


class UnmergedForm(Protocol):
    """The same model with one ELF per kernel, each of which can be computed by somebody else instead."""

    @property
    def n_layers(self) -> int:
        """Number of layers."""

    def layer_outputs(
        self,
        prompt_ids: Sequence[int],
        token: int | None,
        chosen: Callable[[str, int], bool],
        compute: Callable[[KernelCall], Array],
    ) -> list[Array]:
        """Output of every layer: of a prefill, or of the decode step behind it that is fed ``token``.

        ``compute`` gives the result, f32 or bf16, of each kernel that ``chosen(kernel, layer)`` names.
        """

    def kernels(self, path: str) -> list[str]:
        """Kernels of a layer of ``prefill`` or ``decode``, as far as that has run, in order."""

    def close(self) -> None:
        """Release the device."""


class LaunchProbe(Protocol):
    """Shows single launches of a runner as they run (bisect).

    A runner offers it as ``launch_probe() -> LaunchProbe``, together with ``device_arithmetic``,
    ``decode_step_probed`` and ``kv_cache``.
    """

    @property
    def device(self) -> str:
        """The device in words, such as ``twin (modelled)``."""

    @property
    def wrong_length(self) -> type[Exception]:
        """What the runner's ``prefill`` raises when production counts another number of tokens."""

    def observed(self) -> AbstractContextManager[LaunchTap]:
        """Inside the block every run of an ELF is read back; nothing is compiled anew."""

    def layout(self, sizes: ModelSizes) -> DeviceLayout:
        """The layout of a model of these sizes; they are the checkpoint's, not the deployment's."""

    def unmerged(self) -> UnmergedForm:
        """Build the form with one ELF per kernel, with the runner's weights."""
