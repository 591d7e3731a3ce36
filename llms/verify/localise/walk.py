"""Walk through the calls of one prefill or decode step and judge everything on the way.

Three kinds of rows, in the order of execution: what the host hands to an ELF (`host`), the weights and tables
in its static buffers (`static`), and the result of every launch (`kernel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llms.verify.localise.checkpoint import ARGUMENTS, Truth
from llms.verify.localise.judge import SELECTION, Row, compare, cosine, relative, wide
from llms.verify.localise.naming import bits, figure, own_name, reader, result_name, slots
from llms.verify.localise.stages import (
    Expectation,
    Stages,
    join_heads,
    linear,
    plain_attention,
    split_heads,
)
from llms.verify.localise.tap import Call
from llms.verify.reference.arithmetic import DeviceArithmetic, PhaseArithmetic

Array = np.ndarray[Any, Any]

# f32 on the host and one cast: only roundings at a tie may differ. Clean on the twin 2e-9, and 4e-3 with 64
# empty slots not masked.
HOST_LIMIT = 1e-3
# A rotary value may be one step of bf16 off, where transformers' f32 angle rounds another way.
TABLE_LIMIT = 2.0**-8


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

    def ends_at(self, path: str, step: int, layer: int) -> bool:
        """Whether what comes with this layer has nothing to add."""
        if self.first is not None:
            here = (self.first.path, self.first.step) == (path, step)
            self.ended = not here or layer > self.first.layer + LAYERS_BEHIND
        return self.ended

    def prefill(self, calls: Sequence[Call], ids: Sequence[int], cache: tuple[Array, Array] | None) -> None:
        """Judge the calls of a prefill of `ids`, then the KV cache it left."""
        pass_ = _Pass(self, "prefill", -1, self.arithmetic.prefill, list(ids), 0)
        pass_.run(calls)
        self._check_cache(pass_, cache, 0, len(ids))

    def decode(
        self, calls: Sequence[Call], token: int, position: int, step: int, cache: tuple[Array, Array] | None
    ) -> None:
        """Judge the calls of one decode step."""
        pass_ = _Pass(self, "decode", step, self.arithmetic.decode, [token], position)
        pass_.run(calls)
        self._check_cache(pass_, cache, position, 1)

    def logits(self, path: str, step: int, shown: Array, chosen: int) -> None:
        """What the runner hands over is what the LM head put out, finite, and its largest is chosen."""
        if self.ended:
            return
        layer = self.truth.config.n_layers
        held = np.concatenate(self.head)[: shown.size] if self.head else np.empty(0)
        problems = []
        if held.shape != shown.shape or not np.array_equal(wide(held), wide(shown)):
            problems.append("the logits handed over are not those of the LM head")
        if not np.isfinite(wide(shown)).all():
            problems.append("logits that are not finite")
        elif int(np.argmax(wide(shown))) != chosen:
            problems.append(f"token {chosen} was chosen, the largest logit is {int(np.argmax(wide(shown)))}")
        self.note(Row(path, step, layer, SELECTION, "logits", "host", not problems, note="; ".join(problems)))

    def _check_cache(self, pass_: _Pass, cache: tuple[Array, Array] | None, start: int, count: int) -> None:
        """The KV cache holds what the kernels put out, in the right slots."""
        if cache is None or self.ended:
            return
        for name, held, mine in (("K", cache[0], self.keys), ("V", cache[1], self.values)):
            for layer in range(min(len(held), self.truth.config.n_layers)):
                if layer not in mine:
                    continue
                want = np.concatenate(mine[layer], axis=1)[:, : start + count]
                got = np.asarray(held)[layer][:, : start + count]
                if want.shape == got.shape and np.array_equal(want, got):
                    pass_.add(layer, "kv_cache", name, "host", True)
                    continue
                pass_.add(
                    layer, "kv_cache", name, "host", False, note=slots(name, want, np.asarray(held)[layer])
                )


class _Pass:
    """One prefill or one decode step."""

    def __init__(
        self, walk: Walk, path: str, step: int, how: PhaseArithmetic, ids: Sequence[int], position: int
    ) -> None:
        self.walk, self.truth = walk, walk.truth
        self.path, self.step, self.how = path, step, how
        self.ids = list(ids)
        self.position = position
        self.layer = -1
        self.known: dict[str, Array] = {}
        self.missing: set[str] = set()
        self.previous: Array | None = None
        self.stages: Stages | None = None

    def add(self, layer: int, kernel: str, result: str, kind: str, ok: bool, **more: Any) -> None:
        self.walk.note(Row(self.path, self.step, layer, kernel, result, kind, ok, **more))

    def run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            names = {buffer.name for buffer in call.program.buffers}
            if "norm_w" in names and "x" in call.arguments:
                self._finish_layer()
                if self.walk.ends_at(self.path, self.step, self.layer + 1):
                    return
                self._next_layer(call)
            if any(name.startswith("logits") for name in names):
                self._head(call)
                continue
            if self.stages is None:
                self.add(0, call.program.name, "order", "host", False, note="ran before the first layer")
                continue
            self._inputs(call)
            self._statics(call)
            self._results(call)
        self._finish_layer()
        if self.layer + 1 != self.truth.config.n_layers:
            note = f"{self.layer + 1} layers ran, the checkpoint has {self.truth.config.n_layers}"
            self.add(max(0, self.layer), "layers", "count", "host", False, note=note)

    # -- layers ------------------------------------------------------------------------------------

    def _next_layer(self, call: Call) -> None:
        self.layer += 1
        rows = call.arguments["x"].reshape(-1, self.truth.device.emb_dim).shape[0]
        table = self.truth.table(self.position + rows)[self.position :]
        layer = min(self.layer, self.truth.config.n_layers - 1)
        self.stages = Stages(self.truth, self.how, layer, table)
        self.missing = set(self.stages.names())
        self.known = {}
        if call.layer != self.layer:
            note = f"runs with the buffers of layer {call.layer}"
            self.add(self.layer, call.program.name, "buffers", "host", False, note=note)

    def _finish_layer(self) -> None:
        if self.stages is None:
            return
        self.missing.discard("attn") if "attn" in self.known else None
        for name in self.stages.names():
            if name in self.missing:
                self.add(self.layer, name, name, "kernel", False, note="no launch puts it out")
        roped, value = self.known.get("k_roped"), self.known.get(self.stages.value)
        if roped is not None and value is not None:
            for store, array in ((self.walk.keys, roped), (self.walk.values, value)):
                heads = split_heads(
                    array.reshape(len(self.stages.table), -1), self.truth.config.n_kv_heads, self.truth
                )
                store.setdefault(self.layer, []).append(heads[:, : len(self.ids)])
        self.previous = self.known.get("out")
        self.stages = None

    # -- what the host hands over --------------------------------------------------------------------

    def _inputs(self, call: Call) -> None:
        assert self.stages is not None
        flash = any(launch.spec.op == "flash_attention" for launch in call.program.launches)
        for buffer in call.program.buffers:
            if buffer.role != "input" or buffer.name not in call.arguments:
                continue
            name, given = buffer.name, call.arguments[buffer.name]
            if flash:
                self._packed(call, name, given)
            elif name in ("table_q", "table_k"):
                self._table(call, name, given, "host")
            elif name == "attn":
                self._attention_input(call, given)
            else:
                self._same(call, name, given)
            if not flash:
                self.known[own_name(call, name)] = given

    def _same(self, call: Call, name: str, given: Array) -> None:
        if name in ("x", "residual"):
            self._stream(call, name, given)
            return
        wanted = self.known.get(own_name(call, name))
        if wanted is None:
            self.add(self.layer, call.program.name, name, "host", False, note="given before it was computed")
            return
        self._equal(call, name, given, wanted)

    def _stream(self, call: Call, name: str, given: Array) -> None:
        """The residual stream: the embedding, then the output of the layer before."""
        if self.layer == 0:
            wanted = self.truth.weights.embedding[np.asarray(self.ids)]
            given, what = given.reshape(-1, wanted.shape[1])[: len(self.ids)], "the embedding of the tokens"
        elif self.previous is None:
            return
        else:
            wanted, what = self.previous, f"the output of layer {self.layer - 1}"
        self._equal(call, name, given, wanted, what)

    def _equal(self, call: Call, name: str, given: Array, wanted: Array, what: str = "") -> None:
        ok = given.size == wanted.size and np.array_equal(bits(given).ravel(), bits(wanted).ravel())
        note = "" if ok else f"input '{name}' is not {what or f'the {name} that was computed'}"
        self.add(self.layer, call.program.name, name, "host", ok, cosine=figure(ok, given, wanted), note=note)

    def _packed(self, call: Call, name: str, given: Array) -> None:
        assert self.stages is not None
        source = self.known.get({"q": "q_roped", "k": "k_roped", "v": self.stages.value}[name])
        if source is None:
            return
        if given.ndim == 3:
            d = self.truth.device.head_dim
            rows = source.reshape(given.shape[1], -1, d if name != "v" else given.shape[2])
            source = rows.transpose(1, 0, 2)
        self._equal(call, name, given, source, "what RoPE and projection put out")

    def _table(self, call: Call, name: str, given: Array, kind: str) -> None:
        assert self.stages is not None
        table = self.stages.table
        rows = given.reshape(-1, table.shape[1])
        wanted = np.repeat(table, max(1, rows.shape[0] // len(table)), axis=0)
        ok = rows.shape == wanted.shape and bool((np.abs(wide(rows) - wide(wanted)) <= TABLE_LIMIT).all())
        note = "" if ok else f"'{name}' does not hold the checkpoint's angles" + self._other_position(rows)
        label, measured = call.label(f"{name[-1]}_roped"), figure(ok, rows, wanted)
        self.add(self.layer, label, name, kind, ok, cosine=measured, note=note)

    def _other_position(self, rows: Array) -> str:
        if self.path != "decode":
            return ""
        table = wide(self.truth.table(self.position + 3))
        hits = np.flatnonzero((np.abs(table - wide(rows[0])) <= TABLE_LIMIT).all(axis=1))
        return f": they are those of position {hits[0]}, not {self.position}" if hits.size else ""

    def _attention_input(self, call: Call, given: Array) -> None:
        """Attention on the device was judged as a kernel: here it is passed on. On the host: judged here."""
        assert self.stages is not None
        found = self.known.get("attn")
        if found is not None:
            self._equal(call, "attn", given, found)
            return
        try:
            wanted = self._host_attention()
        except KeyError:
            return
        rows = given.reshape(wanted.shape)[: len(self.ids)]
        wanted = wanted[: len(self.ids)]
        error = relative(rows, wanted)
        ok = bool(np.isfinite(wide(rows)).all()) and error <= HOST_LIMIT
        note = "" if ok else f"error {error:.2e}, limit {HOST_LIMIT:.0e}{self._attention_guess(rows)}"
        label = "decode_attention_cpu" if self.path == "decode" else "prefill_attention_cpu"
        self.add(
            self.layer,
            label,
            "attn",
            "host",
            ok,
            cosine=cosine(rows, wanted),
            error=error,
            expected=HOST_LIMIT / 2,
            note=note,
        )

    def _host_attention(self) -> Array:
        assert self.stages is not None
        stages = self.stages
        if self.path == "prefill":
            names = ("q_roped", "k_roped", stages.value)
            return stages.attention(*(self.known[name] for name in names)).reference
        query, keys, values = self._decode_operands()
        out = plain_attention(query, keys, values, causal=False)
        return join_heads(out, self.truth)

    def _decode_operands(self) -> tuple[Array, Array, Array]:
        assert self.stages is not None
        c = self.truth.config
        query = split_heads(self.known["q_roped"].reshape(1, -1), c.n_heads, self.truth)
        both = []
        for store, name in ((self.walk.keys, "k_roped"), (self.walk.values, self.stages.value)):
            new = split_heads(self.known[name].reshape(1, -1), c.n_kv_heads, self.truth)
            both.append(np.concatenate([*store[self.layer], new], axis=1))
        return query, both[0], both[1]

    def _attention_guess(self, rows: Array) -> str:
        """Which known mistake explains the host's attention, if one does."""
        if self.path != "decode":
            return ""
        c = self.truth.config
        query, keys, values = self._decode_operands()
        order = [h % c.n_kv_heads for h in range(c.n_heads)]
        zero = np.zeros_like(keys[:, :1])
        guesses = {
            "query head h reads KV head h % kv_heads: wrong GQA map": (keys[order], values[order]),
            "the token's own position is not attended": (keys[:, :-1], values[:, :-1]),
            "K and V are swapped": (values, keys),
            "K and V of the newest position are empty": (
                np.concatenate([keys[:, :-1], zero], 1),
                np.concatenate([values[:, :-1], zero], 1),
            ),
        }
        for text, (k, v) in guesses.items():
            if (
                k.shape[1]
                and relative(rows, join_heads(plain_attention(query, k, v, causal=False), self.truth))
                <= 2 * HOST_LIMIT
            ):
                return f"; {text}"
        return ""

    # -- weights and tables --------------------------------------------------------------------------

    def _statics(self, call: Call) -> None:
        assert self.stages is not None
        for name, held in call.static.items():
            kernel = reader(call, name)
            if name in ("table_q", "table_k"):
                self._table(call, name, held, "static")
                continue
            key, columns = self._weight_of(name)
            wanted = self.stages.weights.get(key)
            if wanted is None:
                continue
            laid_out = wanted.T if self.path == "prefill" and wanted.ndim == 2 else wanted[..., columns]
            ok = held.shape == laid_out.shape and np.array_equal(bits(held), bits(laid_out))
            note = "" if ok else f"argument '{name}' is not {key} of the checkpoint{self._whose(held, key)}"
            measured = figure(ok, held, laid_out)
            self.add(self.layer, kernel, name, "static", ok, cosine=measured, note=note)

    def _weight_of(self, name: str) -> tuple[str, slice]:
        """Weight that a static argument holds, and which of its columns (`w_down1`: the second slice)."""
        key = ARGUMENTS.get(name, name)
        whole = key.rstrip("0123456789")
        if whole == key:
            return key, slice(None)
        number, widths = int(key[len(whole) :]), self.how.linears["down_proj"].slices
        return whole, slice(sum(widths[:number]), sum(widths[: number + 1]))

    def _whose(self, held: Array, key: str) -> str:
        for layer in (self.layer, *(i for i in range(self.truth.config.n_layers) if i != self.layer)):
            for name, other in self.truth.named(layer).items():
                natural = other.T if self.path == "prefill" else other
                for laid_out, how in ((natural, ""), (natural.T, ", transposed")):
                    if laid_out.shape != held.shape or (layer, name) == (self.layer, key):
                        continue
                    if np.array_equal(bits(held), bits(laid_out)):
                        return f": it holds {name} of layer {layer}{how}"
        return ""

    # -- launches ------------------------------------------------------------------------------------

    def _results(self, call: Call) -> None:
        assert self.stages is not None
        for launch in call.program.launches:
            buffer = dict(launch.operands)["out"].buffer
            name = result_name(call, launch, buffer)
            if buffer not in call.arguments:
                continue
            result = call.arguments[buffer]
            if launch.spec.op == "flash_attention":
                result = self._unpacked(result)
            try:
                expected = self.stages.expect(name, self._get, result.shape)
            except KeyError:
                expected = None
            self.known[name] = result
            self.missing.discard(name)
            if expected is not None:
                self._judge(call.label(buffer), name, result, expected)

    def _get(self, name: str) -> Array:
        return self.known[name]

    def _unpacked(self, out: Array) -> Array:
        """Attention's output as rows: head first becomes row first."""
        if out.ndim != 3:
            return out
        return np.ascontiguousarray(out.transpose(1, 0, 2)).reshape(out.shape[1], -1)

    def _judge(self, kernel: str, name: str, result: Array, expected: Expectation) -> None:
        ok, figures, note = compare(result, expected.reference, expected.matched)
        self.add(self.layer, kernel, name, "kernel", ok, note=note, **figures)

    # -- LM head -------------------------------------------------------------------------------------

    def _head(self, call: Call) -> None:
        self._finish_layer()
        given = call.arguments["x"]
        layer = self.truth.config.n_layers
        if self.previous is not None:
            row = self.previous.reshape(-1, self.truth.device.emb_dim)[len(self.ids) - 1]
            wanted = self._final_norm(row, given.size)
            error = relative(given, wanted)
            ok = bool(np.isfinite(wide(given)).all()) and error <= HOST_LIMIT
            note = "" if ok else f"input 'x' is not the final norm of the last row: error {error:.2e}"
            self.add(
                layer, "final_rms_norm", "x", "host", ok, cosine=cosine(given, wanted), error=error, note=note
            )
        matrix = self.truth.weights.lm_head
        self.walk.head = []
        start = 0
        for launch in call.program.launches:
            buffer = dict(launch.operands)["out"].buffer
            result = call.arguments[buffer]
            self.walk.head.append(result.reshape(-1))
            part = matrix[start : start + result.size]
            start += result.size
            expected = linear(given[None, :], part, self.walk.arithmetic.lm_head)
            got = result[: part.shape[0]]
            ok, figures, note = compare(got, expected.reference.ravel(), expected.matched.ravel())
            self.add(layer, call.label(buffer), buffer, "kernel", ok, note=note, **figures)

    def _final_norm(self, row: Array, size: int) -> Array:
        x = wide(row)[: self.truth.config.emb_dim]
        scale = 1.0 / np.sqrt(np.mean(x * x) + self.truth.config.rms_eps)
        out = np.zeros(size, dtype=bfloat16)
        out[: x.size] = (x * scale * wide(self.truth.weights.final_norm)).astype(np.float32).astype(bfloat16)
        return out
