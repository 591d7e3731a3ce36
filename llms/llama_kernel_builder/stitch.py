"""Join programs into one ELF by an explicit argument map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .exceptions import ProgramError
from .program import Buffer, Launch, OperandRef, Program


@dataclass(frozen=True)
class Part:
    """One program of a stitched ELF.

    `prefix` makes launch names unique; `argument_map` gives, for every buffer of the program, the
    global buffer it becomes (a name, or an OperandRef for a contiguous part of a packed buffer).
    """

    prefix: str
    program: Program
    argument_map: Mapping[str, str | OperandRef]


def stitch(
    name: str, buffers: Sequence[Buffer], parts: Sequence[Part], *, placeholders: Sequence[str] = ()
) -> Program:
    """Join `parts` in order over the global `buffers`.

    Raises ProgramError when a map is incomplete, names a buffer that does not exist, disagrees in
    shape or dtype, gives a buffer two writers, or leaves a global buffer unused that is not listed
    in `placeholders`.
    """
    by_name = {buffer.name: buffer for buffer in buffers}
    launches: list[Launch] = []
    prefixes: set[str] = set()
    for part in parts:
        if part.prefix in prefixes:
            raise ProgramError(f"stitch '{name}': prefix '{part.prefix}' is used twice")
        prefixes.add(part.prefix)
        local = _check_map(name, part, by_name)
        for launch in part.program.launches:
            refs = tuple((operand, _rebase(ref, local, part.program)) for operand, ref in launch.operands)
            label = part.prefix if len(part.program.launches) == 1 else f"{part.prefix}_{launch.name}"
            launches.append(Launch(label, launch.spec, refs))
    return Program(name, tuple(buffers), tuple(launches), placeholders=frozenset(placeholders))


def _check_map(name: str, part: Part, buffers: Mapping[str, Buffer]) -> dict[str, OperandRef]:
    where = f"stitch '{name}', part '{part.prefix}'"
    local_names = {buffer.name for buffer in part.program.buffers}
    missing = sorted(local_names - set(part.argument_map))
    if missing:
        raise ProgramError(f"{where}: the map leaves out argument {', '.join(missing)}")
    surplus = sorted(set(part.argument_map) - local_names)
    if surplus:
        raise ProgramError(f"{where}: the map names {', '.join(surplus)}, which the program does not have")
    refs: dict[str, OperandRef] = {}
    for buffer in part.program.buffers:
        target = part.argument_map[buffer.name]
        ref = OperandRef(target) if isinstance(target, str) else target
        other = buffers.get(ref.buffer)
        if other is None:
            raise ProgramError(f"{where}: argument '{buffer.name}' maps to unknown buffer '{ref.buffer}'")
        if other.dtype != buffer.dtype:
            raise ProgramError(
                f"{where}: argument '{buffer.name}' is {buffer.dtype}, buffer '{other.name}' is {other.dtype}"
            )
        shape = ref.shape if ref.shape is not None else other.shape
        if prod(shape) != buffer.elements:
            raise ProgramError(
                f"{where}: argument '{buffer.name}' is {buffer.shape}, '{other.name}' gives {shape}"
            )
        refs[buffer.name] = ref
    return refs


def _rebase(ref: OperandRef, local: Mapping[str, OperandRef], program: Program) -> OperandRef:
    """Express a reference into a local buffer as one into the global buffer."""
    base = local[ref.buffer]
    shape = ref.shape if ref.shape is not None else program.buffers[program.index[ref.buffer]].shape
    return OperandRef(base.buffer, base.offset + ref.offset, shape)
