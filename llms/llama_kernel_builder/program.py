"""Programs: named buffers with roles and an ordered list of launches, one program per ELF."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from .backend import STANDALONE_TILING, BackendOptions, options_of
from .exceptions import ProgramError
from .specs import DTYPE_BYTES, KernelSpec, Shape

ROLES = ("input", "static", "intermediate", "output")


@dataclass(frozen=True)
class Buffer:
    """One argument of an ELF.

    role: `input` written at every call, `static` written once per buffer set (weights, tables),
    `intermediate` never leaves the device, `output` read back by the host.
    """

    name: str
    shape: Shape
    dtype: str = "bf16"
    role: str = "input"

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ProgramError(f"buffer '{self.name}': role '{self.role}' is none of {', '.join(ROLES)}")
        if self.dtype not in DTYPE_BYTES:
            raise ProgramError(
                f"buffer '{self.name}': dtype '{self.dtype}' is none of {', '.join(DTYPE_BYTES)}"
            )
        if not self.shape or any(extent < 1 for extent in self.shape):
            raise ProgramError(f"buffer '{self.name}': shape {self.shape} must have positive extents")

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class OperandRef:
    """A contiguous part of a buffer: `offset` in elements, `shape` as the kernel sees it (None: all)."""

    buffer: str
    offset: int = 0
    shape: Shape | None = None


@dataclass(frozen=True)
class Launch:
    """One kernel launch inside an ELF: a spec and the buffers its operands are bound to."""

    name: str
    spec: KernelSpec
    operands: tuple[tuple[str, OperandRef], ...]


@dataclass(frozen=True)
class Program:
    """What becomes one ELF. Validated on construction (ProgramError says which launch and operand).

    `options` of the back end follow from the launches when none are given. `placeholders` are arguments that
    no launch uses on purpose.
    """

    name: str
    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    options: BackendOptions | None = None
    placeholders: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        _validate(self)

    @cached_property
    def backend(self) -> BackendOptions:
        """Options of the back end for this ELF."""
        return self.options or options_of(launch.spec for launch in self.launches)

    @property
    def instance_name(self) -> str:
        """Function of the module: the kernel is looked up by it, whatever the artefact is called."""
        return self.name

    @cached_property
    def index(self) -> dict[str, int]:
        """Argument index by buffer name."""
        return {buffer.name: i for i, buffer in enumerate(self.buffers)}

    def indices(self, role: str) -> tuple[int, ...]:
        """Argument indices of all buffers with one role."""
        return tuple(i for i, buffer in enumerate(self.buffers) if buffer.role == role)

    def request(self) -> dict[str, Any]:
        """The program as JSON-able data: what a toolchain compiles and what the cache key covers."""
        return {
            "name": self.name,
            "options": {
                "instance_name": self.instance_name,
                **self.backend.request(),
                "placeholders": sorted(self.placeholders),
            },
            "arguments": [
                {"name": b.name, "shape": list(b.shape), "dtype": b.dtype, "role": b.role}
                for b in self.buffers
            ],
            "launches": [_launch_request(launch) for launch in self.launches],
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON of `request()`: equal programs have equal digests."""
        text = json.dumps(self.request(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def leaf_program(name: str, spec: KernelSpec) -> Program:
    """Wrap one kernel in a program of its own: one buffer per operand, named as the operand."""
    buffers = []
    for operand, sig in spec.signature().items():
        role = "output" if sig.written else "input"
        if operand == "scratch":
            role = "intermediate"
        buffers.append(Buffer(operand, sig.shape, sig.dtype, role))
    refs = tuple((operand, OperandRef(operand)) for operand in spec.signature())
    options = options_of([spec], tiling=STANDALONE_TILING)
    return Program(name, tuple(buffers), (Launch(name, spec, refs),), options)


def _launch_request(launch: Launch) -> dict[str, Any]:
    spec = launch.spec
    operands: dict[str, Any] = {}
    for operand, ref in launch.operands:
        entry: dict[str, Any] = {"arg": ref.buffer}
        if ref.offset:
            entry["offset"] = ref.offset
        if ref.shape is not None:
            entry["shape"] = list(ref.shape)
        operands[operand] = entry
    request: dict[str, Any] = {
        "name": launch.name,
        "op": spec.op,
        "method": spec.method,
        "dims": dict(spec.dims),
        "attrs": dict(spec.attrs),
        "tile": dict(spec.tile),
        "herd": list(spec.herd),
        "symbol": spec.symbol,
        "object_file": spec.object_file,
        "operands": operands,
    }
    if spec.rounding is not None:
        request["rounding"] = spec.rounding
    return request


def _validate(program: Program) -> None:
    names = [buffer.name for buffer in program.buffers]
    _no_duplicates(names, f"program '{program.name}': buffer")
    _no_duplicates([launch.name for launch in program.launches], f"program '{program.name}': launch")
    if not program.launches:
        raise ProgramError(f"program '{program.name}' has no launch")
    by_name = {buffer.name: buffer for buffer in program.buffers}
    written: dict[str, list[tuple[int, int, str]]] = {}
    used: set[str] = set()
    for launch in program.launches:
        _validate_launch(program.name, launch, by_name, written, used)
    unused = [name for name in names if name not in used and name not in program.placeholders]
    if unused:
        raise ProgramError(f"program '{program.name}': no launch uses argument {', '.join(unused)}")
    for buffer in program.buffers:
        if buffer.role == "output" and buffer.name in used and buffer.name not in written:
            raise ProgramError(f"program '{program.name}': no launch writes output '{buffer.name}'")
        if buffer.role == "static" and buffer.name in written:
            writer = written[buffer.name][0][2]
            raise ProgramError(
                f"program '{program.name}': launch '{writer}' writes static buffer '{buffer.name}'"
            )


def _validate_launch(
    program: str,
    launch: Launch,
    buffers: Mapping[str, Buffer],
    written: dict[str, list[tuple[int, int, str]]],
    used: set[str],
) -> None:
    where = f"program '{program}', launch '{launch.name}'"
    signature = launch.spec.signature()
    refs = dict(launch.operands)
    missing = sorted(set(signature) - set(refs))
    extra = sorted(set(refs) - set(signature))
    if missing or extra:
        raise ProgramError(
            f"{where}: operands missing {missing or 'none'}, not of this kernel {extra or 'none'}"
        )
    ranges: list[tuple[str, int, int]] = []
    for operand, sig in signature.items():
        ref = refs[operand]
        buffer = buffers.get(ref.buffer)
        if buffer is None:
            raise ProgramError(f"{where}: operand '{operand}' refers to unknown buffer '{ref.buffer}'")
        shape = ref.shape if ref.shape is not None else buffer.shape
        if prod(shape) != prod(sig.shape):
            raise ProgramError(
                f"{where}: operand '{operand}' is {sig.shape}, buffer '{buffer.name}' gives {shape}"
            )
        if buffer.dtype != sig.dtype:
            raise ProgramError(
                f"{where}: operand '{operand}' is {sig.dtype}, buffer '{buffer.name}' is {buffer.dtype}"
            )
        start, stop = ref.offset, ref.offset + prod(shape)
        if start < 0 or stop > buffer.elements:
            raise ProgramError(
                f"{where}: operand '{operand}' covers elements {start}..{stop} of buffer "
                f"'{buffer.name}' with {buffer.elements}"
            )
        used.add(buffer.name)
        if sig.written:
            ranges.append((buffer.name, start, stop))
        elif buffer.role in ("intermediate", "output") and not _covered(
            written.get(buffer.name, []), start, stop
        ):
            raise ProgramError(
                f"{where}: operand '{operand}' reads '{buffer.name}' before any launch wrote it"
            )
    for name, start, stop in ranges:
        for other_start, other_stop, writer in written.get(name, []):
            if start < other_stop and other_start < stop:
                raise ProgramError(f"{where}: '{name}' already written by launch '{writer}': two writers")
        written.setdefault(name, []).append((start, stop, launch.name))


def _covered(ranges: Iterable[tuple[int, int, str]], start: int, stop: int) -> bool:
    """True when the union of the written ranges holds [start, stop)."""
    for low, high, _ in sorted(ranges):
        if low > start:
            return False
        start = max(start, high)
        if start >= stop:
            return True
    return start >= stop


def _no_duplicates(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ProgramError(f"{what} name '{name}' is used twice")
        seen.add(name)
