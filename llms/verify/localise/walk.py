"""Walk through the runs of one prefill or decode step and judge everything on the way.

Three kinds of rows, in the order of execution: what the host hands to an ELF (`host`), the weights and tables
in its static buffers (`static`), and the result of every launch (`kernel`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llms.verify.contract.launches import ElfRun
from llms.verify.contract.records import Array
from llms.verify.localise.checkpoint import Truth
from llms.verify.localise.handed_over import judge_inputs
from llms.verify.localise.held import judge_statics
from llms.verify.localise.judge import SELECTION, Row, wide
from llms.verify.localise.layer import LayerPass, Step
from llms.verify.localise.naming import slots
from llms.verify.localise.results import judge_head, judge_results
from llms.verify.localise.stages import Stages
from llms.verify.reference.arithmetic import DeviceArithmetic, PhaseArithmetic

# Layers that are still judged behind the one with the first bad comparison: they show whether it is a fault
# of one layer or of a kernel wherever it runs. The rest of a walk has nothing to add.
LAYERS_BEHIND = 2


@dataclass
class Walk:
    """State of a walk over one prompt: what every layer has put into the KV cache so far.

    The walk ends a few layers behind the first bad comparison on `path` (None: on any).
    """

    truth: Truth
    arithmetic: DeviceArithmetic
    path: str | None = None
    rows: list[Row] = field(default_factory=list)
    keys: dict[int, list[Array]] = field(default_factory=dict)
    values: dict[int, list[Array]] = field(default_factory=dict)
    head: list[Array] = field(default_factory=list)
    first: Row | None = None
    ended: bool = False

    def note(self, row: Row) -> None:
        """Add a comparison."""
        self.rows.append(row)
        if self.first is None and not row.ok and self.path in (None, row.path):
            self.first = row

    def note_all(self, rows: Iterable[Row]) -> None:
        """Add comparisons."""
        for row in rows:
            self.note(row)

    def ends_at(self, step: Step, layer: int) -> bool:
        """Whether what comes with this layer has nothing to add."""
        if self.first is not None:
            here = (self.first.path, self.first.step) == (step.path, step.step)
            self.ended = not here or layer > self.first.layer + LAYERS_BEHIND
        return self.ended

    def prefill(self, runs: Sequence[ElfRun], ids: Sequence[int], cache: tuple[Array, Array] | None) -> None:
        """Judge the runs of a prefill of `ids`, then the KV cache it left."""
        self._judge(Step("prefill", -1, tuple(ids), 0), self.arithmetic.prefill, runs, cache)

    def decode(
        self, runs: Sequence[ElfRun], token: int, position: int, step: int, cache: tuple[Array, Array] | None
    ) -> None:
        """Judge the runs of one decode step."""
        self._judge(Step("decode", step, (token,), position), self.arithmetic.decode, runs, cache)

    def _judge(
        self,
        step: Step,
        how: PhaseArithmetic,
        runs: Sequence[ElfRun],
        cache: tuple[Array, Array] | None,
    ) -> None:
        StepWalk(self, step, how).over(runs)
        if cache is not None and not self.ended:
            self._check_cache(step, cache)

    def logits(self, path: str, step: int, shown: Array, chosen: int) -> None:
        """What the runner hands over is what the LM head put out, finite, and its largest is chosen."""
        if self.ended:
            return
        layer = self.truth.sizes.n_layers
        held = np.concatenate(self.head)[: shown.size] if self.head else np.empty(0)
        problems = []
        if held.shape != shown.shape or not np.array_equal(wide(held), wide(shown)):
            problems.append("the logits handed over are not those of the LM head")
        if not np.isfinite(wide(shown)).all():
            problems.append("logits that are not finite")
        elif int(np.argmax(wide(shown))) != chosen:
            problems.append(f"token {chosen} was chosen, the largest logit is {int(np.argmax(wide(shown)))}")
        self.note(Row(path, step, layer, SELECTION, "logits", "host", not problems, note="; ".join(problems)))

    def _check_cache(self, step: Step, cache: tuple[Array, Array]) -> None:
        """The KV cache holds what the kernels put out, in the right slots."""
        end = step.position + len(step.ids)
        for name, held, mine in (("K", cache[0], self.keys), ("V", cache[1], self.values)):
            for layer in range(min(len(held), self.truth.sizes.n_layers)):
                if layer not in mine:
                    continue
                slot_rows = np.asarray(held)[layer]
                want = np.concatenate(mine[layer], axis=1)[:, :end]
                ok = want.shape == slot_rows[:, :end].shape and np.array_equal(want, slot_rows[:, :end])
                note = "" if ok else slots(name, want, slot_rows)
                self.note(step.row(layer, "kv_cache", name, "host", ok, note=note))


class StepWalk:
    """Walk through one prefill or one decode step, layer by layer."""

    def __init__(self, walk: Walk, step: Step, how: PhaseArithmetic) -> None:
        self._walk, self._truth, self._step, self._how = walk, walk.truth, step, how
        self._layer: LayerPass | None = None
        self._index = -1
        self._previous: Array | None = None

    def over(self, runs: Sequence[ElfRun]) -> None:
        """Judge the runs in order, up to where the walk ends."""
        walk, n_layers = self._walk, self._truth.sizes.n_layers
        for run in runs:
            if "norm_w" in run.roles and "x" in run.arguments:
                self._finish_layer()
                if walk.ends_at(self._step, self._index + 1):
                    return
                self._begin_layer(run)
            if any(name.startswith("logits") for name in run.roles):
                self._finish_layer()
                how = walk.arithmetic.lm_head
                walk.note_all(judge_head(self._truth, self._step, run, self._previous, how))
                walk.head = [run.arguments[launch.writes].reshape(-1) for launch in run.launches]
            elif self._layer is None:
                note = "ran before the first layer"
                walk.note(self._step.row(0, run.elf, "order", "host", False, note=note))
            else:
                for judge in (judge_inputs, judge_statics, judge_results):
                    walk.note_all(judge(self._layer, run))
        self._finish_layer()
        if self._index + 1 != n_layers:
            note = f"{self._index + 1} layers ran, the checkpoint has {n_layers}"
            walk.note(self._step.row(max(0, self._index), "layers", "count", "host", False, note=note))

    def _begin_layer(self, run: ElfRun) -> None:
        self._index += 1
        truth, position = self._truth, self._step.position
        rows = run.arguments["x"].reshape(-1, truth.device.emb_dim).shape[0]
        table = truth.table(position + rows)[position:]
        stages = Stages(truth, self._how, min(self._index, truth.sizes.n_layers - 1), table)
        walk = self._walk
        self._layer = LayerPass(
            truth, self._step, self._index, stages, self._previous, walk.keys, walk.values
        )
        if run.layer != self._index:
            note = f"runs with the buffers of layer {run.layer}"
            walk.note(self._layer.row(run.elf, "buffers", "host", False, note=note))

    def _finish_layer(self) -> None:
        """Note results that nobody put out, and keep the layer's output, keys and values."""
        layer = self._layer
        if layer is None:
            return
        if "attn" in layer.known:
            layer.missing.discard("attn")
        for name in layer.stages.names():
            if name in layer.missing:
                self._walk.note(layer.row(name, name, "kernel", False, note="no launch puts it out"))
        keys, values = layer.known.get("k_roped"), layer.known.get(layer.stages.value)
        if keys is not None and values is not None:
            for store, array in ((self._walk.keys, keys), (self._walk.values, values)):
                rows = array.reshape(len(layer.stages.table), -1)
                heads = self._truth.split_heads(rows, self._truth.sizes.n_kv_heads)
                store.setdefault(self._index, []).append(heads[:, : len(self._step.ids)])
        self._previous = layer.known.get("out")
        self._layer = None
