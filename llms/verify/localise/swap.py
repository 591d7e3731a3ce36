"""Exchange kernels, one ELF each, for their plain fp32 references, and see whether that heals the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llms.verify.contract.abilities.launch_probe import LaunchProbe, UnmergedForm
from llms.verify.contract.launches import KernelCall
from llms.verify.contract.records import Array
from llms.verify.gates.phase6.diagnosis import cosines
from llms.verify.gates.phase6.gate import MEDIAN_LIMIT
from llms.verify.localise.judge import Row
from llms.verify.reference.kernels import reference_output

if TYPE_CHECKING:
    from llms.verify.reference.hf import ReferenceRun

Chosen = Callable[[str, int], bool]


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


def reference(call: KernelCall) -> Array:
    """What a kernel should compute, by its operands; Llama's rope and mask whatever the kernel says."""
    attrs = {**call.attrs, "causal": True}
    method = "half_split" if call.op == "rope" else call.method
    return reference_output(call.op, call.inputs, dims=call.dims, method=method, attrs=attrs)


def layer_cosines(records: Sequence[Mapping[str, Array]], reference_layers: Array) -> list[float]:
    """Median cosine per layer; records as a runner gives them, reference [layers, .., emb]."""
    return [
        float(np.median(cosines(record["ffn_out"], layer)))
        for record, layer in zip(records, reference_layers, strict=False)
    ]


class Exchange:
    """The unmerged form over one prompt, measured against the layers of the reference."""

    def __init__(self, form: UnmergedForm, ids: Sequence[int], run: ReferenceRun) -> None:
        self.form = form
        self.fed = tuple(run.fed)
        self._ids, self._run = ids, run

    def lowest(self, path: str, chosen: Chosen) -> float:
        """Lowest median cosine of a layer, in prefill or the first decode step; -1 when it is not finite."""
        decode = path == "decode"
        layers = self.form.layer_outputs(self._ids, self.fed[0] if decode else None, chosen, reference)
        wanted = self._run.decode_layers[0] if decode else self._run.prefill_layers
        lowest = min(layer_cosines([{"ffn_out": layer} for layer in layers], wanted))
        return lowest if np.isfinite(lowest) else -1.0


def try_swaps(
    probe: LaunchProbe, ids: Sequence[int], run: ReferenceRun, bad: Sequence[Row]
) -> Confirmation | None:
    """Exchange the first suspect kernel in all layers; without a suspect, layers by halves."""
    if bad and bad[0].kind != "kernel":
        return None
    form = probe.unmerged()
    try:
        exchange = Exchange(form, ids, run)
        return confirm(exchange, bad[0]) if bad else halves(exchange)
    finally:
        form.close()


def confirm(exchange: Exchange, first: Row) -> Confirmation:
    """Exchange the kernel of a bad row in every layer."""
    before = exchange.lowest(first.path, lambda name, layer: False)
    after = exchange.lowest(first.path, lambda name, layer: name == first.kernel)
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


def halves(exchange: Exchange) -> Confirmation | None:
    """Smallest number of leading layers whose exchange heals the model; None when nothing is ill."""
    path = "prefill"
    before = exchange.lowest(path, lambda name, layer: False)
    if before >= MEDIAN_LIMIT and exchange.fed:
        path = "decode"
        before = exchange.lowest(path, lambda name, layer: False)
    if before >= MEDIAN_LIMIT:
        return None
    best = exchange.lowest(path, lambda name, layer: True)
    if not 1 - best < 0.5 * (1 - before):
        note = (
            f"{path}: lowest layer cosine {before:.4f}, and {best:.4f} with every kernel exchanged for its "
            "fp32 reference: no kernel is at fault; look at the host's part, the weights, the configuration"
        )
        return Confirmation("all layers", before, best, False, note)

    def healed(chosen: Chosen) -> bool:
        return 1 - exchange.lowest(path, chosen) < 0.5 * (1 - before)

    layer = fewest(exchange.form.n_layers, lambda count: healed(lambda name, at: at < count)) - 1
    after = exchange.lowest(path, lambda name, at: at <= layer)
    note = (
        f"{path}: exchanging the kernels of layers 0 to {layer} heals the model, fewer do not: look at layer "
        f"{layer}"
    )
    names = exchange.form.kernels(path)
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
