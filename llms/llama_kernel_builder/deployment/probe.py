"""The ability ``launch_probe``: the launches of a session as they run, and its kernels one by one.

The programs looked at are the deployed ones. After each run every argument is read back from the device,
intermediates included, as they are buffers too. Nothing is recompiled for it, so it works on silicon and twin
alike. The unmerged form is a second session, in which the result of any kernel can come from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from ml_dtypes import bfloat16

from llms.llama_kernel_builder.block_runner import BlockRunner
from llms.llama_kernel_builder.cache import KernelCache
from llms.llama_kernel_builder.deployment.session import Session
from llms.llama_kernel_builder.device_config import device_config, head_columns
from llms.llama_kernel_builder.exceptions import BadArgument
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.program import Program
from llms.llama_kernel_builder.weights import LayerWeights, ModelWeights, pad_weights
from llms.verify.contract.launches import ElfRun, KernelCall, Launch, LayeredWeights, ModelSizes

Array = np.ndarray[Any, Any]
Chosen = Callable[[str, int], bool]
Compute = Callable[[KernelCall], Array]

_BF16 = np.dtype(bfloat16)
_LAYER = re.compile(r"_L(\d+)(?:\||$)")


class SessionProbe:
    """:class:`llms.verify.contract.abilities.LaunchProbe` over a session."""

    wrong_length: type[Exception] = BadArgument

    def __init__(self, session: Session) -> None:
        self._session = session
        self.device = session.driver.label

    @contextmanager
    def observed(self) -> Iterator[Tap]:
        """Tap every run of the session's cache, on the buffers that the run really has."""
        cache = self._session.cache
        tap = Tap(cache)
        runtime = cache.runtime
        bind, execute = runtime.run_for, runtime.execute
        bo_key = ""

        def run_for(artefact: Path, name: str, key: str, bos: Sequence[Any]) -> Any:
            nonlocal bo_key
            bo_key = key
            return bind(artefact, name, key, bos)

        def execute_and_read(name: str, bound: Any) -> None:
            execute(name, bound)
            tap.observe(name, bo_key, bound.bos)

        with (
            mock.patch.object(runtime, "run_for", run_for),
            mock.patch.object(runtime, "execute", execute_and_read),
        ):
            yield tap

    def layout(self, sizes: ModelSizes) -> Layout:
        """The layout of these sizes; what has none, the session's configuration says."""
        return Layout(replace(self._session.config, **vars(sizes)))

    def unmerged(self) -> Unmerged:
        """A second session of the same model: same weights and tables, one ELF per kernel."""
        return Unmerged(self._session)


class Tap:
    """Collected runs, grouped by whoever runs the model."""

    def __init__(self, cache: KernelCache) -> None:
        self._cache = cache
        self._runs: list[ElfRun] = []
        self._seen: set[tuple[str, int]] = set()

    def take(self) -> list[ElfRun]:
        """Return and forget the runs collected so far."""
        runs, self._runs = self._runs, []
        return runs

    def observe(self, name: str, key: str, bos: Sequence[Any]) -> None:
        """Read back all arguments of a run that has just ended."""
        program = self._cache.program(name)
        match = _LAYER.search(key)
        layer = int(match.group(1)) if match else 0
        first = (name, layer) not in self._seen
        self._seen.add((name, layer))
        arguments: dict[str, Array] = {}
        static: dict[str, Array] = {}
        for buffer, bo in zip(program.buffers, bos, strict=False):
            if (buffer.role == "static" and not first) or buffer.dtype == "f32":
                continue
            raw = np.asarray(self._cache.runtime.read(bo, buffer.nbytes)).copy()
            content = raw.view(_BF16).reshape(buffer.shape)
            (static if buffer.role == "static" else arguments)[buffer.name] = content
        roles = {buffer.name: buffer.role for buffer in program.buffers}
        self._runs.append(ElfRun(program.name, layer, roles, _launches(program), arguments, static))


def _launches(program: Program) -> tuple[Launch, ...]:
    return tuple(
        Launch(
            launch.name,
            launch.spec.op,
            {key: ref.buffer for key, ref in launch.operands if key != "out"},
            dict(launch.operands)["out"].buffer,
        )
        for launch in program.launches
    )


class Layout:
    """:class:`llms.verify.contract.abilities.DeviceLayout` of a configuration."""

    def __init__(self, config: ModelConfig) -> None:
        padded = device_config(config)
        self._config = config
        self.sizes = ModelSizes(**{field.name: getattr(padded, field.name) for field in fields(ModelSizes)})

    def head_columns(self, heads: int) -> Array:
        """Padded column of every real column of ``heads`` heads."""
        return head_columns(self._config, heads)

    def weights(self, weights: LayeredWeights) -> LayeredWeights:
        """The weights in the widths of the device."""
        layers = [LayerWeights(**layer) for layer in weights.layers]
        whole = ModelWeights(weights.embedding, layers, weights.final_norm, weights.lm_head)
        padded = pad_weights(whole, self._config)
        held = tuple(
            {name: array for name, array in vars(layer).items() if array is not None}
            for layer in padded.layers
        )
        return LayeredWeights(padded.embedding, held, padded.final_norm, padded.lm_head)


class ExchangeRunner(BlockRunner):
    """One ELF per kernel; those that `chosen(program, layer)` names are left to `compute`."""

    def __init__(self, cache: KernelCache) -> None:
        super().__init__(cache, merged=False)
        self.chosen: Chosen = lambda name, layer: False
        self.compute: Compute | None = None
        self.programs_run: dict[str, None] = {}
        self._static: dict[tuple[str, int], dict[str, Array]] = {}

    def preload(self, name: str, layer: int, static: Mapping[str, Array], pools: Mapping[str, str]) -> None:
        """Also keep the arrays: whoever computes a kernel elsewhere needs them."""
        super().preload(name, layer, static, pools)
        for program in self._get(name):
            self._static[(program.name, layer)] = {
                b.name: static[b.name] for b in program.buffers if b.role == "static"
            }

    def run_program(self, program: Program, layer: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one ELF or compute what it would."""
        if layer == 0:
            self.programs_run[program.name] = None
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        if self.compute is None or not self.chosen(program.name, layer):
            return super().run_program(program, layer, arrays)
        static = self._static.get((program.name, layer), {})
        return exchanged(program, {**arrays, **static}, self.compute)


def exchanged(program: Program, arguments: Mapping[str, Array], compute: Compute) -> dict[str, Array]:
    """Results of the launches of a program by `compute`, in bf16 and in the shapes of the device."""
    values = dict(arguments)
    outputs: dict[str, Array] = {}
    for launch in program.launches:
        spec, operands = launch.spec, dict(launch.operands)
        inputs = {}
        for operand, sig in spec.signature().items():
            if not sig.written:
                ref = operands[operand]
                flat = values[ref.buffer].reshape(-1)[ref.offset :]
                inputs[operand] = flat[: int(np.prod(sig.shape))].reshape(sig.shape)
        result = compute(KernelCall(spec.op, dict(spec.dims), spec.method, dict(spec.attrs), inputs))
        out = operands["out"].buffer
        values[out] = outputs[out] = result.astype(bfloat16).reshape(spec.signature()["out"].shape)
    return outputs


class Unmerged:
    """:class:`llms.verify.contract.abilities.UnmergedForm`: a session with one ELF per kernel."""

    def __init__(self, session: Session) -> None:
        self.n_layers = session.config.n_layers
        self._session = Session(
            session.module,
            session.checkpoint,
            session.tokenizer,
            session.max_seq,
            config=session.config,
            npu_attn=session.npu_attn,
            merged=False,
        )
        self._session.weights, self._session.rope_lut = session.weights, session.rope_lut
        self._runners = {path: ExchangeRunner(self._session.cache) for path in ("prefill", "decode")}
        self._session.prefill_cache = self._runners["prefill"]
        self._session.decode_cache = self._runners["decode"]

    def layer_outputs(
        self, prompt_ids: Sequence[int], token: int | None, chosen: Chosen, compute: Compute
    ) -> list[Array]:
        """Run the prompt, and with a token the decode step behind it."""
        for runner in self._runners.values():
            runner.chosen, runner.compute = chosen, compute
        self._session.prepare(len(prompt_ids))
        layers: list[Array] = []
        self._session.prefill(prompt_ids, layers)
        if token is not None:
            layers = []
            self._session.decode(token, len(prompt_ids), layers)
        return layers

    def kernels(self, path: str) -> list[str]:
        """Kernels of a layer of this path in the order of execution."""
        return list(self._runners[path].programs_run)

    def close(self) -> None:
        """Release its buffers and contexts."""
        self._session.close()
