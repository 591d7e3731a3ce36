"""Optional abilities of an adapter or its runner: what phases need beyond ``prefill`` and ``decode_step``.

A gate asks with :func:`needed`, or with :func:`offered` where it can do without. What lacks the ability gets
"not offered", never a pass. An ability only computes: references, inputs and limits stay with the gates.

* ``weight_ledger()``, ``rope_table()`` of the runner: phase 0
* ``forms() -> Forms`` of the runner: phases 3 to 5
* ``performance(tokenise, n_tokens) -> Performance`` of the runner: the performance tests of phase 6
* ``decode_step_probed``, ``kv_cache``, ``prompt_limits``, ``device_arithmetic`` of the runner: the ladder
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from llms.verify.contract.records import Array, NpuRunner

Section = Literal["prefill", "decode"]


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


@dataclass(frozen=True)
class Form:
    """A form of the production path. merged: one ELF per block instead of one per kernel. resident:
    activations stay on the device between ELFs.
    """

    name: str
    merged: bool
    resident: bool


UNFUSED = Form("unfused", merged=False, resident=False)
MERGED = Form("merged", merged=True, resident=False)
PRODUCTION = Form("merged, buffers reused", merged=True, resident=True)


class LeafKernel(Hashable, Protocol):
    """A kernel as dispatched: equal ones do the same arithmetic in the same order; ``str`` names it."""

    @property
    def op(self) -> str:
        """Operation, such as ``gemm``."""

    @property
    def method(self) -> str:
        """How the operation is computed, such as ``drain``."""

    @property
    def dtype_out(self) -> str:
        """``bf16`` or ``f32``."""

    def dim(self, name: str) -> int:
        """A dimension by name, such as ``K``."""


@dataclass(frozen=True)
class Dispatch:
    """What one prefill or decode step hands to the device.

    programs: (name, digest, calls); kernels: leaf kernels with their number of launches; writes and reads:
    transfers of activations, with their bytes.
    """

    programs: tuple[tuple[str, str, int], ...]
    kernels: tuple[tuple[LeafKernel, int], ...]
    writes: int = 0
    reads: int = 0
    bytes_written: int = 0
    bytes_read: int = 0

    @property
    def calls(self) -> int:
        """Runs of an ELF."""
        return sum(calls for _, _, calls in self.programs)

    @property
    def launches(self) -> int:
        """Kernel launches inside them."""
        return sum(count for _, count in self.kernels)


@dataclass(frozen=True, eq=False)
class TimedStep:
    """One prefill or decode step of a form.

    token: the one chosen; logits: [vocab] float32, a copy; seconds: on the device clock; dispatch: None
    unless it was asked for.
    """

    token: int
    logits: Array
    seconds: float
    dispatch: Dispatch | None = None


class BuiltForm(Protocol):
    """A form that is ready to run; it has the device from the first step to ``close``."""

    clock: str
    """Whose time it is, such as ``twin (modelled)``."""

    def prepare(self, prompt_len: int) -> None:
        """Compile and preload what a prompt of this length needs; opens no hardware context."""

    def prefill(self, prompt_ids: Sequence[int], *, counted: bool = False) -> TimedStep:
        """Run a prompt into a new KV cache. ``counted``: say what was dispatched."""

    def decode_step(self, token: int, position: int, *, counted: bool = False) -> TimedStep:
        """One step on the KV cache of the last prefill."""

    def runner(self) -> NpuRunner:
        """The same form as a runner, with layer outputs."""

    def close(self) -> None:
        """Release the device."""


class Forms(Protocol):
    """What ``forms()`` of a runner returns: the same production functions, one optimisation more or less."""

    def build(self, form: Form, max_seq: int) -> BuiltForm:
        """Build a form with a KV cache of at least ``max_seq`` positions."""

    def compiled_lengths(self) -> tuple[int, ...]:
        """Lengths that prompts are padded to, ascending."""

    def layouts(self, section: Section) -> tuple[tuple[str, str], ...]:
        """(name, reason) of the layouts that this model does not get: not legal, not available or worse."""


class Performance(Protocol):
    """What ``performance()`` of a runner returns: everything in place, nothing of it timed."""

    def first_token(self) -> int:
        """Tokenise, prefill, choose the first token."""

    def decode_one(self) -> int:
        """One decode step after ``first_token``; the position wraps at the end of the KV cache."""

    def breakdown(self, section: Section) -> list[dict[str, Any]]:
        """Rows per ELF, kernel, host operation and transfer of one more prefill or decode step."""

    def comparison(self) -> dict[str, Any]:
        """Payload of a record ``comparison``: predicted and published figures of this model."""
