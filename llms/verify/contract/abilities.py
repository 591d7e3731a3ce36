"""Optional abilities of an adapter or its runner: what phases need beyond ``prefill`` and ``decode_step``.

A gate asks with :func:`needed`, or with :func:`offered` where it can do without. What lacks the ability gets
"not offered", never a pass. An ability only computes: references, inputs and limits stay with the gates.

* ``launch_probe() -> LaunchProbe`` of the runner: the bisect
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from llms.verify.contract.launches import ElfRun, KernelCall, LayeredWeights, ModelSizes
from llms.verify.contract.records import Array


class NotOffered(Exception):
    """The adapter or the runner lacks the ability that a gate needs; the text names it."""


def offered(provider: object, name: str) -> Callable[..., Any] | None:
    """The function of this name of a runner or an adapter module, or None when it has none.

    Where the ``build_runner`` of an adapter is the method of an object, what that object offers counts, too,
    so that a model folder need not name every ability.
    """
    owner = getattr(getattr(provider, "build_runner", None), "__self__", None)
    for candidate in (provider, owner):
        method: Callable[..., Any] | None = getattr(candidate, name, None)
        if callable(method):
            return method
    return None


def needed(provider: object, name: str) -> Callable[..., Any]:
    """The function of this name. Raises NotOffered."""
    method = offered(provider, name)
    if method is None:
        kind = "adapter" if hasattr(provider, "build_runner") else "runner"
        raise NotOffered(f"the {kind} has no {name}() (a {type(provider).__name__})")
    return method


class LaunchTap(Protocol):
    """Collects the runs of ELFs while it is open."""

    def take(self) -> Sequence[ElfRun]:
        """The runs since the last time, in order."""
        ...


class DeviceLayout(Protocol):
    """How the device lays out a model: padded widths, and where the real columns lie in them.

    Padding lies behind all real columns, but in Q, K and V, where every head has its own.
    """

    @property
    def sizes(self) -> ModelSizes:
        """Sizes as padded; columns that were added are zero."""
        ...

    def head_columns(self, heads: int) -> Array:
        """int[heads * head_dim]: padded column of every real column of ``heads`` heads of Q, K or V."""
        ...

    def weights(self, weights: LayeredWeights) -> LayeredWeights:
        """The same weights as the device has them."""
        ...


class UnmergedForm(Protocol):
    """The same model with one ELF per kernel, each of which can be computed by somebody else instead."""

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        ...

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
        ...

    def kernels(self, path: str) -> list[str]:
        """Kernels of a layer of ``prefill`` or ``decode``, as far as that has run, in order."""
        ...

    def close(self) -> None:
        """Release the device."""
        ...


class LaunchProbe(Protocol):
    """Shows single launches of a runner as they run (bisect).

    A runner offers it as ``launch_probe() -> LaunchProbe``, together with ``device_arithmetic``,
    ``decode_step_probed`` and ``kv_cache``.
    """

    @property
    def device(self) -> str:
        """The device in words, such as ``twin (modelled)``."""
        ...

    @property
    def wrong_length(self) -> type[Exception]:
        """What the runner's ``prefill`` raises when production counts another number of tokens."""
        ...

    def observed(self) -> AbstractContextManager[LaunchTap]:
        """Inside the block every run of an ELF is read back; nothing is compiled anew."""
        ...

    def layout(self, sizes: ModelSizes) -> DeviceLayout:
        """The layout of a model of these sizes; they are the checkpoint's, not the deployment's."""
        ...

    def unmerged(self) -> UnmergedForm:
        """Build the form with one ELF per kernel, with the runner's weights."""
        ...
