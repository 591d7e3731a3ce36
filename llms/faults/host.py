"""Faults of the host toolkit: buffers, keys, artefacts, states of runs, recorded results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import llms.llama_kernel_builder.deployment.runner
from llms.faults.seams import Array
from llms.llama_kernel_builder import block, runtime
from llms.llama_kernel_builder.block_runner import BlockRunner
from llms.llama_kernel_builder.runtime import HostRuntime
from llms.llama_kernel_builder.toolchains.seam import Loading
from npu_twin import injection
from npu_twin.faults._types import Fault
from npu_twin.faults.compile import requests

_EXAMPLES = "Xilinx/mlir-air e972f2942, programming_examples/llms"
_SKILLS = "Xilinx/mlir-air e972f2942, .claude/skills/"
_XRT = "XRT 2.25.0, run::wait and ert_cmd_state"


@contextlib.contextmanager
def _written_once(argument: str) -> Iterator[None]:
    """An activation is taken for static: written at the first call of its buffer and never again."""
    right = HostRuntime.write
    seen: set[tuple[str, int]] = set()

    def write(self: HostRuntime, bo: Any, data: Any, *what: Any) -> None:
        if what and what[0][1] == argument:
            if (what[0][0], id(bo)) in seen:
                return
            seen.add((what[0][0], id(bo)))
        right(self, bo, data, *what)

    with mock.patch.object(HostRuntime, "write", write):
        yield


@contextlib.contextmanager
def _one_key() -> Iterator[None]:
    """All layers name the buffers of layer 0."""
    preload, run = BlockRunner.preload, BlockRunner._run

    def preload_first(self: BlockRunner, name: str, layer: int, *rest: Any) -> None:
        preload(self, name, 0, *rest)

    def run_first(self: BlockRunner, name: str, programs: Any, layer: int, inputs: Any) -> Any:
        return run(self, name, programs, 0, inputs)

    with (
        mock.patch.object(BlockRunner, "preload", preload_first),
        mock.patch.object(BlockRunner, "_run", run_first),
    ):
        yield


@contextlib.contextmanager
def _shared_static() -> Iterator[None]:
    """The pool of a weight is named without its layer, so all layers read the one written last."""
    right = BlockRunner.preload

    def preload(
        self: BlockRunner, name: str, layer: int, static: Mapping[str, Array], pools: Mapping[str, str]
    ) -> None:
        joined = {
            key: pool.replace(f".L{layer}.", ".") if key == "wv" else pool for key, pool in pools.items()
        }
        right(self, name, layer, static, joined)

    with mock.patch.object(BlockRunner, "preload", preload):
        yield


@contextlib.contextmanager
def _state_ignored() -> Iterator[None]:
    """Nobody looks at the state that a wait returns, and one run times out."""

    def execute(self: HostRuntime, name: str, bound: Any) -> None:
        bound.run.start()
        bound.run.wait(self.wait_limit_ms)

    with (
        mock.patch.object(HostRuntime, "execute", execute),
        injection.force_state("TIMEOUT", skip=60, times=1),
    ):
        yield


def _older_program(request: dict[str, Any]) -> dict[str, Any]:
    """The program as an earlier version had it: norms with another eps."""
    launches = [
        {**one, "attrs": {**one.get("attrs", {}), "eps": 1e-2}} if one["op"] == "rms_norm" else one
        for one in request["launches"]
    ]
    return {**request, "launches": launches}


def _views() -> contextlib.AbstractContextManager[Any]:
    """What a runner records when it keeps views of one reused buffer: every layer shows the last one's."""
    right: Callable[..., Any] = llms.llama_kernel_builder.deployment.runner._named
    return mock.patch.object(
        llms.llama_kernel_builder.deployment.runner,
        "_named",
        lambda layers: right([layers[-1]] * len(layers)) if layers else right(layers),
    )


@contextlib.contextmanager
def _two_writers() -> Iterator[None]:
    """A slice of a stitched program is mapped twice, so two launches write one argument."""
    name = "stitch"
    right = getattr(block, name)

    def stitch(program: str, buffers: Any, parts: Any, **more: Any) -> Any:
        last = parts[-1]
        again = type(last)(f"{last.prefix}_again", last.program, last.argument_map)
        return right(program, buffers, [*parts, again], **more)

    with mock.patch.object(block, name, stitch):
        yield


FAULTS: tuple[Fault, ...] = (
    Fault(
        "activation_static", "silent", "the attention result is written to the device at the first call only",
        _EXAMPLES, "phase3", lambda: _written_once("attn"), "C1",
    ),
    Fault(
        "one_buffer_key", "runtime", "all layers use the buffers of one", _EXAMPLES, "runtime",
        _one_key, "C4",
        raises="BadArgument",
    ),
    Fault(
        "shared_static", "silent", "one buffer for a weight of all layers", _EXAMPLES, "phase3",
        _shared_static, "C5",
    ),
    Fault(
        "run_state_ignored", "verdict", "a run times out and nobody looks at its state", _XRT, "phase3",
        _state_ignored, "C16",
    ),
    Fault(
        "stale_artefact", "silent", "the artefact of an older program is served under the same name",
        _SKILLS + "merge-multi-launch-kernels/SKILL.md", "phase2",
        lambda: requests("stale_artefact", _older_program), "C18",
    ),
    Fault(
        "kernel_name", "runtime", "the kernel in the artefact has another name", _EXAMPLES, "runtime",
        lambda: mock.patch.object(runtime, "loading_of", lambda path, name: Loading(f"{name}_other")), "C21",
        raises="ArtefactRefused",
    ),
    Fault(
        "two_writers", "compile", "two launches write one argument", _SKILLS + "merge-multi-launch-kernels",
        "compile", _two_writers, "D6", raises="ProgramError", says="two writers",
    ),
    Fault(
        "results_are_views", "verdict", "records are views of one reused buffer", _EXAMPLES, "phase3", _views,
        "E9",
    ),
)  # fmt: skip
