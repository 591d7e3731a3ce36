"""The unmerged form, in which any launch can be exchanged for its plain fp32 reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_dtypes import bfloat16

from llms.llama_kernel_builder.block_runner import BlockRunner
from llms.llama_kernel_builder.cache import KernelCache
from llms.llama_kernel_builder.program import Program
from llms.verify.gates.phase6.gate import MEDIAN_LIMIT
from llms.verify.localise.judge import Row
from llms.verify.reference.kernels import reference_output

if TYPE_CHECKING:
    from llms.llama_kernel_builder.deployment.session import Session
    from llms.verify.reference.hf import ReferenceRun

Array = np.ndarray[Any, Any]
Choice = Callable[[str, int], bool]


@dataclass(frozen=True)
class Confirmation:
    """What exchanging did: lowest median cosine of a layer before and after.

    kernel: the exchanged launch, or a range of layers. healed: whether half of the loss is gone.
    """

    kernel: str
    before: float
    after: float
    healed: bool
    note: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-able fields."""
        return dict(vars(self))


class SwapRunner(BlockRunner):
    """One ELF per kernel; launches that `choose(program, layer)` names are computed on the host in fp32."""

    def __init__(self, cache: KernelCache) -> None:
        super().__init__(cache, merged=False)
        self.choose: Choice = lambda name, layer: False
        self.ran: dict[str, None] = {}
        self._static: dict[tuple[str, int], dict[str, Array]] = {}

    def preload(self, name: str, layer: int, static: Mapping[str, Array], pools: Mapping[str, str]) -> None:
        """Also keep the arrays: a reference on the host needs them."""
        super().preload(name, layer, static, pools)
        for program in self._get(name):
            self._static[(program.name, layer)] = {
                b.name: static[b.name] for b in program.buffers if b.role == "static"
            }

    def _run(
        self, name: str, programs: tuple[Program, ...], layer: int, inputs: dict[str, Array]
    ) -> dict[str, Array]:
        values = dict(inputs)
        for program in programs:
            if layer == 0:
                self.ran[program.name] = None
            mine = {b.name: np.asarray(values[b.name]) for b in program.buffers if b.role == "input"}
            if self.choose(program.name, layer):
                values.update(reference(program, {**mine, **self._static.get((program.name, layer), {})}))
            else:
                values.update(self.cache.run(program.name, f"{program.name}_L{layer}", **mine))
        return {key: values[key] for key in self._outputs[name]}


def reference(program: Program, arguments: Mapping[str, Array]) -> dict[str, Array]:
    """What the launches of a program should compute, by its operands; Llama's rope and mask throughout."""
    values = dict(arguments)
    outputs: dict[str, Array] = {}
    for launch in program.launches:
        spec, operands = launch.spec, dict(launch.operands)
        given = {}
        for operand, sig in spec.signature().items():
            if not sig.written:
                ref = operands[operand]
                flat = values[ref.buffer].reshape(-1)[ref.offset :]
                given[operand] = flat[: int(np.prod(sig.shape))].reshape(sig.shape)
        attrs = {**dict(spec.attrs), "causal": True}
        method = "half_split" if spec.op == "rope" else spec.method
        result = reference_output(spec.op, given, dims=dict(spec.dims), method=method, attrs=attrs)
        out = operands["out"].buffer
        values[out] = outputs[out] = result.astype(bfloat16).reshape(spec.signature()["out"].shape)
    return outputs


def layer_cosines(records: Sequence[Mapping[str, Array]], reference_layers: Array) -> list[float]:
    """Median cosine per layer; records as a runner gives them, reference [layers, .., emb]."""
    from llms.verify.gates.phase6.diagnosis import cosines

    return [
        float(np.median(cosines(record["ffn_out"], layer)))
        for record, layer in zip(records, reference_layers, strict=False)
    ]


class Unmerged:
    """A second session of the same model: same weights and tables, one ELF per kernel."""

    def __init__(self, session: Session) -> None:
        from llms.llama_kernel_builder.deployment.session import Session as Fresh

        self.session = Fresh(
            session.module,
            session.checkpoint,
            session.tokenizer,
            session.max_seq,
            config=session.config,
            npu_attn=session.npu_attn,
            merged=False,
        )
        self.session.weights, self.session.rope_lut = session.weights, session.rope_lut
        self.prefill_run = SwapRunner(self.session.cache)
        self.decode_run = SwapRunner(self.session.cache)
        self.session.prefill_cache, self.session.decode_cache = self.prefill_run, self.decode_run

    def lowest(self, path: str, ids: Sequence[int], run: ReferenceRun, choose: Choice) -> float:
        """Lowest median cosine of a layer with launches exchanged, in prefill or the first decode step."""
        self.prefill_run.choose = self.decode_run.choose = choose
        self.session.prepare(len(ids))
        layers: list[Array] = []
        _, _, keys, values, _ = self.session.prefill(ids, layers)
        wanted = run.prefill_layers
        if path == "decode":
            layers = []
            self.session.decode(run.fed[0], keys, values, len(ids), layers)
            wanted = run.decode_layers[0]
        found = min(layer_cosines([{"ffn_out": layer} for layer in layers], wanted))
        return found if np.isfinite(found) else -1.0

    def kernels(self, path: str) -> list[str]:
        """Kernels of a layer in the order of execution, once the path has run."""
        runner = self.prefill_run if path == "prefill" else self.decode_run
        return list(runner.ran)

    def close(self) -> None:
        """Release its buffers and contexts."""
        self.session.close()


def try_swaps(
    session: Session, ids: Sequence[int], run: ReferenceRun, bad: Sequence[Row]
) -> Confirmation | None:
    """Exchange the first suspect kernel in all layers; without a suspect, layers by halves."""
    if bad and bad[0].kind != "kernel":
        return None
    unmerged = Unmerged(session)
    try:
        if bad:
            return _confirm(unmerged, ids, run, bad[0])
        return _halves(unmerged, ids, run)
    finally:
        unmerged.close()


def _confirm(unmerged: Unmerged, ids: Sequence[int], run: ReferenceRun, first: Row) -> Confirmation:
    before = unmerged.lowest(first.path, ids, run, lambda name, layer: False)
    after = unmerged.lowest(first.path, ids, run, lambda name, layer: name == first.kernel)
    healed = 1 - after < 0.5 * (1 - before)
    figures = f"lowest layer cosine ({first.path}) {before:.4f} -> {after:.4f}"
    if healed:
        note = f"exchanging {first.kernel} for its fp32 reference heals the model: {figures}"
    elif before >= MEDIAN_LIMIT:
        note = f"one ELF per kernel: {figures}; a small fault, or one that only the merged ELF has"
    else:
        note = (
            f"exchanging {first.kernel} alone does not heal the model ({figures}): it is not the only fault"
        )
    return Confirmation(first.kernel, before, after, healed, note)


def _halves(unmerged: Unmerged, ids: Sequence[int], run: ReferenceRun) -> Confirmation | None:
    """Smallest number of leading layers whose exchange heals the model; None when nothing is ill."""
    n = unmerged.session.config.n_layers
    path = "prefill"
    before = unmerged.lowest(path, ids, run, lambda name, layer: False)
    if before >= MEDIAN_LIMIT and run.fed:
        path = "decode"
        before = unmerged.lowest(path, ids, run, lambda name, layer: False)
    if before >= MEDIAN_LIMIT:
        return None
    best = unmerged.lowest(path, ids, run, lambda name, layer: True)
    if not 1 - best < 0.5 * (1 - before):
        note = (
            f"{path}: lowest layer cosine {before:.4f}, and {best:.4f} with every kernel exchanged for its "
            "fp32 reference: no kernel is at fault; look at the host's part, the weights, the configuration"
        )
        return Confirmation("all layers", before, best, False, note)

    def healed(choose: Choice) -> bool:
        return 1 - unmerged.lowest(path, ids, run, choose) < 0.5 * (1 - before)

    layer = fewest(n, lambda count: healed(lambda name, at: at < count)) - 1
    after = unmerged.lowest(path, ids, run, lambda name, at: at <= layer)
    note = (
        f"{path}: exchanging the kernels of layers 0 to {layer} heals the model, fewer do not: look at layer "
        f"{layer}"
    )
    names = unmerged.kernels(path)
    if not healed(lambda name, at: at == layer):
        return Confirmation(
            f"layer {layer}", before, after, True, f"{note}; layers before it are ill as well"
        )
    kernel = names[
        fewest(len(names), lambda count: healed(lambda name, at: at == layer and name in names[:count])) - 1
    ]
    return Confirmation(kernel, before, after, True, f"{note}, at {kernel}")


def fewest(n: int, healed: Callable[[int], bool]) -> int:
    """Smallest count from 1 to n with a true `healed(count)`, by halves; that of n is taken as true."""
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if healed(middle) else (middle, high)
    return high
