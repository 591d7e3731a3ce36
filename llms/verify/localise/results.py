"""Results of launches, against what their own inputs should give."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from ml_dtypes import bfloat16

from llms.verify.contract.launches import ElfRun
from llms.verify.contract.records import Array
from llms.verify.localise.checkpoint import Truth
from llms.verify.localise.handed_over import HOST_LIMIT
from llms.verify.localise.judge import Row, compare, cosine, relative, wide
from llms.verify.localise.layer import LayerPass, Step
from llms.verify.localise.naming import result_name
from llms.verify.localise.stages import linear
from llms.verify.reference.arithmetic import LinearArithmetic


def judge_results(layer: LayerPass, run: ElfRun) -> Iterator[Row]:
    """Rows of all launches of a run; their results become known."""
    for launch in run.launches:
        if launch.writes not in run.arguments:
            continue
        name, result = result_name(launch), run.arguments[launch.writes]
        if launch.op == "flash_attention":
            result = _rows_first(result)
        try:
            expected = layer.stages.expect(name, layer.known.__getitem__, result.shape)
        except KeyError:
            expected = None
        layer.known[name] = result
        layer.missing.discard(name)
        if expected is not None:
            ok, figures, note = compare(result, expected.reference, expected.matched)
            yield layer.row(run.label(launch.writes), name, "kernel", ok, note=note, **figures)


def _rows_first(out: Array) -> Array:
    """Attention's output with rows first, if its heads are."""
    return out if out.ndim != 3 else np.ascontiguousarray(out.transpose(1, 0, 2)).reshape(out.shape[1], -1)


def judge_head(
    truth: Truth, step: Step, run: ElfRun, hidden: Array | None, how: LinearArithmetic
) -> Iterator[Row]:
    """Rows of the LM head; hidden: output of the last layer, None when unknown."""
    layer, given = truth.sizes.n_layers, run.arguments["x"]
    if hidden is not None:
        row = hidden.reshape(-1, truth.device.emb_dim)[len(step.ids) - 1]
        wanted = _final_norm(truth, row, given.size)
        error = relative(given, wanted)
        ok = bool(np.isfinite(wide(given)).all()) and error <= HOST_LIMIT
        note = "" if ok else f"input 'x' is not the final norm of the last row: error {error:.2e}"
        figures = {"cosine": cosine(given, wanted), "error": error}
        yield step.row(layer, "final_rms_norm", "x", "host", ok, note=note, **figures)
    start = 0
    for launch in run.launches:
        result = run.arguments[launch.writes]
        part = truth.weights.lm_head[start : start + result.size]
        start += result.size
        expected = linear(given[None, :], part, how)
        reference, matched = expected.reference.ravel(), expected.matched.ravel()
        ok, figures, note = compare(result[: part.shape[0]], reference, matched)
        yield step.row(layer, run.label(launch.writes), launch.writes, "kernel", ok, note=note, **figures)


def _final_norm(truth: Truth, row: Array, size: int) -> Array:
    """RMSNorm in f64 and one cast, with zeros up to the width of the LM head."""
    x = wide(row)[: truth.sizes.emb_dim]
    scale = 1.0 / np.sqrt(np.mean(x * x) + truth.rms_eps)
    out = np.zeros(size, dtype=bfloat16)
    out[: x.size] = (x * scale * wide(truth.weights.final_norm)).astype(np.float32).astype(bfloat16)
    return out
