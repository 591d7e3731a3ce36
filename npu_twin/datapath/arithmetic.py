"""The choices that the arithmetic model of the silicon consists of, each of which can be flipped.

The default of every field is the silicon as published kernels measure it. Another value switches one
approximation off, or replaces it by a variant that the published figures exclude, so a test can show that a
check notices, and an investigation can find out which approximation moves a result::

    with arithmetic(exp2="exact"):
        run = datapath.prepare(launch, operands)   # the choice is taken here, once
    run()                                          # and stays with the closure

Choices are read when a launch is prepared, never while it runs.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

_ALLOWED: dict[str, tuple[object, ...]] = {
    "block_bits": (None, 7, 8, 9),
    "block_overflow": ("raise", "saturate"),
    "direct_cast": ("per_l1", "per_l2", "once"),
    "cascade_cast": ("per_512", "once"),
    "exp2": ("hw", "exact"),
    "reciprocal": ("hw", "exact"),
    "tanh": ("hw", "exact"),
    "bf16_sum": ("hw", "f32"),
    "rounding": (None, "floor", "nearest_even"),
    "cast_rounding": (None, "floor", "nearest_even"),
}


@dataclass(frozen=True)
class Arithmetic:
    """One set of choices. Raises ValueError for a value that a field does not know.

    * ``block_bits``: bits of a block mantissa including its sign in every matrix product; None multiplies
      the bf16 operands as they are.
    * ``block_overflow``: what happens when a rounded mantissa leaves its range: the shared exponent of the
      block is raised (silicon), or the mantissa saturates.
    * ``direct_cast``: where the low-precision GEMM (method ``direct``) rounds its running sum to bf16: after
      each ``tile_k_l1`` step (silicon), each ``tile_k_l2`` step, or once at the end.
    * ``cascade_cast``: the same for the cascade GEMV with residual add, per 512 along K or once.
    * ``exp2``, ``reciprocal``: attention's base-two exponential and reciprocal, approximate as on the device
      or correctly rounded.
    * ``tanh``: the table inside SiLU and GELU, as a surrogate of it or correctly rounded.
    * ``bf16_sum``: whether the norm method ``weighted_bf16_sum`` keeps its sum of squares in bf16.
    * ``rounding``: None takes each launch's own mode; otherwise the mode of all launches.
    * ``cast_rounding``: None takes the mode of the cast launch of a fused-cast GEMM from the launch attribute
      ``cast_rounding`` (``floor`` when absent); otherwise this mode.
    """

    block_bits: int | None = 8
    block_overflow: str = "raise"
    direct_cast: str = "per_l1"
    cascade_cast: str = "per_512"
    exp2: str = "hw"
    reciprocal: str = "hw"
    tanh: str = "hw"
    bf16_sum: str = "hw"
    rounding: str | None = None
    cast_rounding: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value not in allowed:
                known = ", ".join(map(repr, allowed))
                raise ValueError(f"arithmetic choice {name}={value!r} is not one of {known}")

    def rounding_of(self, launch_rounding: str) -> str:
        """Rounding mode in force for a launch that asks for ``launch_rounding``."""
        return self.rounding or launch_rounding


SILICON = Arithmetic()
"""The arithmetic of the device as published measurements show it."""

_current: contextvars.ContextVar[Arithmetic] = contextvars.ContextVar("npu_twin_arithmetic", default=SILICON)


def current_arithmetic() -> Arithmetic:
    """The choices in force for launches prepared now."""
    return _current.get()


@contextlib.contextmanager
def arithmetic(**changes: object) -> Iterator[Arithmetic]:
    """Change some choices for launches prepared inside the ``with`` block.

    Nested blocks add up. Raises TypeError for an unknown choice, ValueError for an unknown value.
    """
    known = {f.name for f in dataclasses.fields(Arithmetic)}
    if unknown := set(changes) - known:
        raise TypeError(
            f"no arithmetic choice {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"
        )
    chosen = dataclasses.replace(_current.get(), **changes)  # type: ignore[arg-type]
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)
