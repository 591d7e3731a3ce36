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

    def named(self, tail: str) -> Block:
        """The same block under a longer name."""
        return replace(self, name=self.name + tail)


def make_block(name: str, buffers: Sequence[Buffer], steps: Sequence[Step], **hooks: Any) -> Block:
    """Build a block; every fused-cast GEMM gets an f32 scratch argument at the end, for its second launch."""
    all_buffers = list(buffers)
    all_steps = []
    for step in steps:
        signature = step.spec.signature()
        if "scratch" in signature:
            scratch = f"{step.label}_f32"
            all_buffers.append(Buffer(scratch, signature["scratch"].shape, "f32", "intermediate"))
            step = replace(step, operands={**step.operands, "scratch": scratch})
        all_steps.append(step)
    return Block(name, tuple(all_buffers), tuple(all_steps), **hooks)


def given(name: str, *shape: int) -> Buffer:
    """An input, written at every call."""
    return Buffer(name, shape, "bf16", "input")


def static(name: str, *shape: int) -> Buffer:
    """A weight or table, written once."""
    return Buffer(name, shape, "bf16", "static")


def inner(name: str, *shape: int) -> Buffer:
    """An intermediate that never leaves the device."""
    return Buffer(name, shape, "bf16", "intermediate")


def result(name: str, *shape: int) -> Buffer:
    """An output, read back by the host."""
    return Buffer(name, shape, "bf16", "output")
