"""Weights and tables in the static buffers of an ELF, against the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llms.verify.contract.launches import ElfRun
from llms.verify.contract.records import Array
from llms.verify.localise.checkpoint import ARGUMENTS
from llms.verify.localise.judge import Row
from llms.verify.localise.layer import LayerPass
from llms.verify.localise.naming import bits, figure


def judge_statics(layer: LayerPass, run: ElfRun) -> Iterator[Row]:
    """Rows of the static arguments of a run."""
    for name, held in run.static.items():
        if name in ("table_q", "table_k"):
            yield layer.angles(run, name, held, "static")
            continue
        key, columns = _weight_of(layer, name)
        wanted = layer.stages.weights.get(key)
        if wanted is None:
            continue
        gemm = layer.step.path == "prefill" and wanted.ndim == 2
        laid_out = wanted.T if gemm else wanted[..., columns]
        ok = held.shape == laid_out.shape and np.array_equal(bits(held), bits(laid_out))
        note = "" if ok else f"argument '{name}' is not {key} of the checkpoint{_whose(layer, held, key)}"
        yield layer.row(run.reader(name), name, "static", ok, cosine=figure(ok, held, laid_out), note=note)


def _weight_of(layer: LayerPass, name: str) -> tuple[str, slice]:
    """Weight that a static argument holds, and which of its columns (`w_down1`: the second slice)."""
    key = ARGUMENTS.get(name, name)
    whole = key.rstrip("0123456789")
    if whole == key:
        return key, slice(None)
    number, widths = int(key[len(whole) :]), layer.stages.how.linears["down_proj"].slices
    return whole, slice(sum(widths[:number]), sum(widths[: number + 1]))


def _whose(layer: LayerPass, held: Array, key: str) -> str:
    """Which other weight of the checkpoint it is, if it is one."""
    others = (index for index in range(layer.truth.sizes.n_layers) if index != layer.index)
    for index in (layer.index, *others):
        for name, weight in layer.truth.weights.layers[index].items():
            natural = weight.T if layer.step.path == "prefill" else weight
            for laid_out, how in ((natural, ""), (natural.T, ", transposed")):
                if laid_out.shape != held.shape or (index, name) == (layer.index, key):
                    continue
                if np.array_equal(bits(held), bits(laid_out)):
                    return f": it holds {name} of layer {index}{how}"
    return ""
