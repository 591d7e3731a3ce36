"""What an operation of a program listing consists of: operands, datapath, rules, configurations and cost.

The vocabulary follows the leaf kernels of the public mlir-air LLM examples (Xilinx/mlir-air e972f2942,
``programming_examples``). The operations themselves are the modules of ``npu_twin.ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from npu_twin.datapath.arithmetic import Arithmetic
    from npu_twin.listing import Launch
    from npu_twin.memory import OperandView

Access = Literal["read", "write"]
Dims = Mapping[str, int]
Values = Mapping[str, float]
"""Parameters of the timing model: name to value."""
ShowsAs = Literal["build", "compile", "place", "hang", "runtime", "silent"]
"""How the real tool chain shows a broken rule: the builder refuses, the compiler fails, placement fails, the
run ends in a time-out, the run fails, or the numbers are wrong without an error.
"""


@dataclass(frozen=True)
class OperandSpec:
    """What an operand must be: its shape, data type (``bf16`` or ``f32``) and whether the launch writes
    it.
    """

    shape: tuple[int, ...]
    dtype: str = "bf16"
    access: Access = "read"


Signature = Mapping[str, OperandSpec]


def read(*shape: int) -> OperandSpec:
    """A bf16 operand that the launch reads."""
    return OperandSpec(shape)


def write(*shape: int, dtype: str = "bf16") -> OperandSpec:
    """An operand that the launch writes."""
    return OperandSpec(shape, dtype, "write")


class LaunchLike(Protocol):
    """The part of a launch that rules and cost read; ``npu_twin.listing.Launch`` and ``Config`` have it."""

    @property
    def op(self) -> str:
        """Operation of the kernel vocabulary, e.g. ``gemm``."""

    @property
    def method(self) -> str:
        """Implementation, e.g. ``fused-cast``."""

    @property
    def dims(self) -> Dims:
        """Problem dimensions by name."""

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes, e.g. ``causal``."""

    @property
    def tile(self) -> Mapping[str, int]:
        """Tile sizes by name."""

    @property
    def herd(self) -> tuple[int, int]:
        """Cores along the columns and the rows of the array."""

    @property
    def name(self) -> str:
        """Name within the program."""


@dataclass(frozen=True)
class Config:
    """One configuration of a kernel at a shape: reads like a launch, but has no operands."""

    op: str
    method: str
    dims: Dims
    tile: Mapping[str, int] = field(default_factory=dict)
    herd: tuple[int, int] = (8, 1)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def cores(self) -> int:
        """Number of cores in use."""
        return self.herd[0] * self.herd[1]

    def describe(self) -> str:
        """One line: method, tiles, herd and the attributes that belong to the tiling."""
        parts = [f"{k}={v}" for k, v in self.tile.items()]
        parts += [
            f"{k}={self.attrs[k]}" for k in ("heads_per_unroll", "num_cascade_stages") if k in self.attrs
        ]
        return f"{self.method} {' '.join(parts)} herd {self.herd[0]}x{self.herd[1]}".replace("  ", " ")


@dataclass(frozen=True)
class Finding:
    """A broken rule: rule id, sentence, values. ``shows_as`` overrides the rule's own."""

    rule_id: str
    message: str
    values: Mapping[str, Any]
    shows_as: ShowsAs | None = None


Findings = Iterator[Finding]


@dataclass(frozen=True)
class Op:
    """One operation: what the listing, the device, the compiler and the clock must know of it.

    Attributes:
        dims: names of its dimensions, in the order of the listing.
        signature: operands that follow from dimensions, method and tile. ValueError for an impossible tile.
        prepare: binds a launch to its operands and returns the closure that computes it.
        check: yields every broken rule of one launch; the second argument names rules switched on.
        space: configurations worth a sweep, legal or not: dimensions, method (empty for any), attributes.
        work: microseconds of one loaded launch; the flag says that it is a program of its own, not a part.
        methods: empty for an operation with one implementation; such a launch may name any method.
        rounding: mode of its cores: nearest even where they multiply matrices, else the reset mode.
        tile_keys: tile sizes without which nothing can be checked.
        fill: parameter of the first data on their way, empty where none are waited for.
        load: parameter of loading it, where that is not a matter of the tiles it occupies.
        whole_array: occupies every tile, whatever its herd.
        one_row: multiplies matrices with a vector, as programs of one row (decode) do.
        one_stream: its one long input arrives while the launch is still being loaded.
        usual: configurations to prefer where any of them is legal.
        second_launch: microseconds of a launch that a method appends, loading included; 0 for one launch.
    """

    dims: tuple[str, ...]
    signature: Callable[[Dims, str, Mapping[str, int]], Signature]
    prepare: Callable[[Launch, Mapping[str, OperandView], Arithmetic], Callable[[], None]]
    check: Callable[[LaunchLike, frozenset[str]], Findings]
    space: Callable[[Dims, str, Mapping[str, Any]], Iterator[Config]]
    work: Callable[[Values, LaunchLike, bool], float]
    methods: tuple[str, ...] = ()
    rounding: str = "floor"
    tile_keys: tuple[str, ...] = ()
    fill: str = ""
    load: str = ""
    whole_array: bool = False
    one_row: bool = False
    one_stream: bool = False
    usual: Callable[[Config], bool] | None = None
    second_launch: Callable[[Values, LaunchLike], float] | None = None
