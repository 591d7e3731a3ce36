"""Blocks: named buffers and an ordered list of kernels, as one ELF or as one ELF per kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .program import Buffer, OperandRef, Program, leaf_program
from .specs import KernelSpec
from .stitch import Part, stitch

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


@dataclass(frozen=True)
class Step:
    """One kernel of a block: label, spec, and the block buffer of each operand, whole or a part of it."""

    label: str
    spec: KernelSpec
    operands: Mapping[str, str | OperandRef]

    @property
    def names(self) -> dict[str, str]:
        """Name of the buffer of each operand."""
        return {key: ref if isinstance(ref, str) else ref.buffer for key, ref in self.operands.items()}


@dataclass(frozen=True)
class Block:
    """Buffers and kernel sequence of one ELF.

    `pack` and `unpack` are host work on its inputs and outputs (the head-first layout of attention).
    """

    name: str
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    pack: Callable[[Arrays], Arrays] | None = None
    unpack: Callable[[Arrays], Arrays] | None = None

    def merged(self) -> Program:
        """All kernels in one ELF: intermediates stay on the device."""
        parts = [Part(step.label, leaf_program(step.label, step.spec), step.operands) for step in self.steps]
        return stitch(self.name, self.buffers, parts)

    def unmerged(self) -> tuple[Program, ...]:
        """One ELF per kernel, arguments named as the block's buffers: every result visits the host."""
        by_name = {buffer.name: buffer for buffer in self.buffers}
        programs = []
        for step in self.steps:
            signature = step.spec.signature()
            roles = {}
            for operand, name in step.names.items():
                if signature[operand].written:
                    roles[name] = "intermediate" if operand == "scratch" else "output"
                else:
                    roles[name] = "static" if by_name[name].role == "static" else "input"
            buffers = [replace(by_name[name], role=role) for name, role in roles.items()]
            part = Part(step.label, leaf_program(step.label, step.spec), step.operands)
            programs.append(stitch(f"{self.name}.{step.label}", buffers, [part]))
        return tuple(programs)

    def arguments(self, role: str) -> tuple[str, ...]:
        """Names of the buffers of a role, in order."""
        return tuple(buffer.name for buffer in self.buffers if buffer.role == role)

    def named(self, tail: str) -> Block:
        """The same block under a longer name."""
        return replace(self, name=self.name + tail)


@dataclass(frozen=True)
class Op:
    """One kernel of an ELF with the buffers it brings, in argument order; weights and tables are static."""

    step: Step
    buffers: tuple[Buffer, ...]


def make_block(
    name: str, ops: Sequence[Op], outputs: Sequence[str], *, last: Sequence[str] = (), **hooks: Any
) -> Block:
    """An ELF of these kernels; its arguments and their roles follow from what the kernels name.

    outputs: what the host reads back; anything else that is written never leaves the device, anything that
    is neither written nor static is given at every call. last: arguments that published ELFs have at the end
    of their list. Every fused-cast GEMM gets an f32 scratch argument behind them, for its second launch.
    """
    brought = {buffer.name: buffer for op in reversed(ops) for buffer in op.buffers}
    order = dict.fromkeys(buffer.name for op in ops for buffer in op.buffers)
    written = {op.step.names["out"] for op in ops}
    buffers, scratch, steps = [], [], []
    for key in (*(key for key in order if key not in last), *last):
        role = "output" if key in outputs else "intermediate" if key in written else brought[key].role
        buffers.append(replace(brought[key], role=role))
    for step in (op.step for op in ops):
        signature = step.spec.signature()
        if "scratch" in signature:
            extra = Buffer(f"{step.label}_f32", signature["scratch"].shape, "f32", "intermediate")
            scratch.append(extra)
            step = replace(step, operands={**step.operands, "scratch": extra.name})
        steps.append(step)
    return Block(name, (*buffers, *scratch), tuple(steps), **hooks)
