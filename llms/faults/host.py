"""Faults of the host toolkit: buffers, keys, artefacts, states of runs, recorded results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

from llms.faults.seams import EXAMPLES, SKILLS, Array, around, fault
from llms.llama_kernel_builder import block, runtime
from llms.llama_kernel_builder.block_runner import BlockRunner
from llms.llama_kernel_builder.deployment import runner
from llms.llama_kernel_builder.runtime import HostRuntime
from llms.llama_kernel_builder.toolchains.seam import Loading
from npu_twin import injection
from npu_twin.faults._types import Fault, Plant
from npu_twin.faults.compile import requests

_XRT = "XRT 2.25.0, run::wait and ert_cmd_state"


def _written_once(argument: str) -> Plant:
    """An activation is taken for static: written at the first call of its buffer and never again."""
    seen: set[tuple[str, int]] = set()

    def write(right: Any, self: HostRuntime, bo: Any, data: Any, *what: Any) -> None:
        if what and what[0][1] == argument:
            if (what[0][0], id(bo)) in seen:
                return
            seen.add((what[0][0], id(bo)))
        right(self, bo, data, *what)

    return around(HostRuntime, "write", write)


@contextlib.contextmanager
def _one_key() -> Iterator[None]:
    """All layers name the buffers of layer 0."""
    with (
        around(BlockRunner, "preload", lambda right, run, name, _, *rest: right(run, name, 0, *rest)),
        around(
            BlockRunner,
            "_run",
            lambda right, run, name, programs, _, inputs: right(run, name, programs, 0, inputs),
        ),
    ):
        yield


def _shared_static(
    right: Any, run: Any, name: str, layer: int, static: Any, pools: Mapping[str, str]
) -> None:
    """The pool of a weight is named without its layer, so all layers read the one written last."""
    joined = {key: pool.replace(f".L{layer}.", ".") if key == "wv" else pool for key, pool in pools.items()}
    right(run, name, layer, static, joined)


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


def _views(right: Any, layers: list[Array] | None) -> Any:
    """What a runner records when it keeps views of one reused buffer: every layer shows the last one's."""
    return right([layers[-1]] * len(layers)) if layers else right(layers)


def _two_writers(right: Any, program: str, buffers: Any, parts: Any) -> Any:
    """A slice of a stitched program is mapped twice, so two launches write one argument."""
    return right(program, buffers, [*parts, replace(parts[-1], prefix=f"{parts[-1].prefix}_again")])


FAULTS: tuple[Fault, ...] = (
    fault(
        "activation_static", "the attention result is written to the device at the first call only",
        lambda: _written_once("attn"), EXAMPLES, "C1",
    ),
    fault(
        "one_buffer_key", "all layers use the buffers of one", _one_key, EXAMPLES, "C4",
        kind="runtime", expected="runtime", raises="BadArgument",
    ),
    fault(
        "shared_static", "one buffer for a weight of all layers",
        lambda: around(BlockRunner, "preload", _shared_static), EXAMPLES, "C5",
    ),
    fault(
        "run_state_ignored", "a run times out and nobody looks at its state", _state_ignored, _XRT, "C16",
        kind="verdict",
    ),
    fault(
        "stale_artefact", "the artefact of an older program is served under the same name",
        lambda: requests("stale_artefact", _older_program), SKILLS + "merge-multi-launch-kernels/SKILL.md",
        "C18", expected="phase2",
    ),
    fault(
        "kernel_name", "the kernel in the artefact has another name",
        lambda: mock.patch.object(runtime, "loading_of", lambda path, name: Loading(f"{name}_other")),
        EXAMPLES, "C21", kind="runtime", expected="runtime", raises="ArtefactRefused",
    ),
    fault(
        "two_writers", "two launches write one argument", lambda: around(block, "stitch", _two_writers),
        SKILLS + "merge-multi-launch-kernels", "D6",
        kind="compile", expected="compile", raises="ProgramError", says="two writers",
    ),
    fault(
        "results_are_views", "records are views of one reused buffer",
        lambda: around(runner, "_named", _views), EXAMPLES, "E9", kind="verdict",
    ),
)  # fmt: skip
