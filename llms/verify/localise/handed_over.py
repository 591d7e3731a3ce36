"""What the host hands to an ELF: results of earlier launches, the residual stream, its own attention."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llms.verify.contract.launches import ElfRun
from llms.verify.contract.records import Array
from llms.verify.localise.judge import Row, cosine, relative, wide
from llms.verify.localise.layer import LayerPass
from llms.verify.localise.naming import own_name
from llms.verify.localise.stages import plain_attention

# f32 on the host and one cast: only roundings at a tie may differ. Clean on the twin 2e-9, and 4e-3 with 64
# empty slots not masked.
HOST_LIMIT = 1e-3


def judge_inputs(layer: LayerPass, run: ElfRun) -> Iterator[Row]:
    """Rows of all inputs of a run; what is handed over becomes known."""
    flash = any(launch.op == "flash_attention" for launch in run.launches)
    for name, role in run.roles.items():
        if role != "input" or name not in run.arguments:
            continue
        given = run.arguments[name]
        if flash:
            yield from _packed(layer, run, name, given)
            continue
        if name in ("table_q", "table_k"):
            yield layer.angles(run, name, given, "host")
        elif name == "attn":
            yield from _attention(layer, run, given)
        elif name in ("x", "residual"):
            yield from _stream(layer, run, name, given)
        else:
            yield _computed(layer, run, name, given)
        layer.known[own_name(run, name)] = given


def _computed(layer: LayerPass, run: ElfRun, name: str, given: Array) -> Row:
    wanted = layer.known.get(own_name(run, name))
    if wanted is None:
        return layer.row(run.elf, name, "host", False, note="given before it was computed")
    return layer.equal(run, name, given, wanted)


def _stream(layer: LayerPass, run: ElfRun, name: str, given: Array) -> Iterator[Row]:
    """The residual stream: the embedding, then the output of the layer before."""
    ids = layer.step.ids
    if layer.index == 0:
        wanted = layer.truth.weights.embedding[np.asarray(ids)]
        rows = given.reshape(-1, wanted.shape[1])[: len(ids)]
        yield layer.equal(run, name, rows, wanted, "the embedding of the tokens")
    elif layer.previous is not None:
        yield layer.equal(run, name, given, layer.previous, f"the output of layer {layer.index - 1}")


def _packed(layer: LayerPass, run: ElfRun, name: str, given: Array) -> Iterator[Row]:
    """Q, K and V of attention on the device, perhaps with heads first."""
    wanted = layer.known.get({"q": "q_roped", "k": "k_roped", "v": layer.stages.value}[name])
    if wanted is None:
        return
    if given.ndim == 3:
        width = layer.truth.device.head_dim if name != "v" else given.shape[2]
        wanted = wanted.reshape(given.shape[1], -1, width).transpose(1, 0, 2)
    yield layer.equal(run, name, given, wanted, "what RoPE and projection put out")


def _attention(layer: LayerPass, run: ElfRun, given: Array) -> Iterator[Row]:
    """Attention on the device was judged as a kernel: here it is passed on. On the host: judged here."""
    computed = layer.known.get("attn")
    if computed is not None:
        yield layer.equal(run, "attn", given, computed)
        return
    try:
        whole = _host_attention(layer)
    except KeyError:
        return
    count = len(layer.step.ids)
    rows, wanted = given.reshape(whole.shape)[:count], whole[:count]
    error = relative(rows, wanted)
    ok = bool(np.isfinite(wide(rows)).all()) and error <= HOST_LIMIT
    yield layer.row(
        f"{layer.step.path}_attention_cpu",
        "attn",
        "host",
        ok,
        cosine=cosine(rows, wanted),
        error=error,
        expected=HOST_LIMIT / 2,
        note="" if ok else f"error {error:.2e}, limit {HOST_LIMIT:.0e}{_explanation(layer, rows)}",
    )


def _host_attention(layer: LayerPass) -> Array:
    if layer.step.path == "prefill":
        q, k, v = (layer.known[name] for name in ("q_roped", "k_roped", layer.stages.value))
        return layer.stages.attention(q, k, v).reference
    query, keys, values = _decode_operands(layer)
    return layer.truth.join_heads(plain_attention(query, keys, values, causal=False))


def _decode_operands(layer: LayerPass) -> tuple[Array, Array, Array]:
    """Query of the token, and keys and values of all positions up to it, [heads, positions, head_dim]."""
    truth = layer.truth
    query = truth.split_heads(layer.known["q_roped"].reshape(1, -1), truth.sizes.n_heads)
    both = []
    for store, name in ((layer.keys, "k_roped"), (layer.values, layer.stages.value)):
        new = truth.split_heads(layer.known[name].reshape(1, -1), truth.sizes.n_kv_heads)
        both.append(np.concatenate([*store[layer.index], new], axis=1))
    return query, both[0], both[1]


def _explanation(layer: LayerPass, rows: Array) -> str:
    """Which known mistake explains the host's attention, if one does."""
    if layer.step.path != "decode":
        return ""
    sizes = layer.truth.sizes
    query, keys, values = _decode_operands(layer)
    order = [head % sizes.n_kv_heads for head in range(sizes.n_heads)]
    zero = np.zeros_like(keys[:, :1])
    mistakes = {
        "query head h reads KV head h % kv_heads: wrong GQA map": (keys[order], values[order]),
        "the token's own position is not attended": (keys[:, :-1], values[:, :-1]),
        "K and V are swapped": (values, keys),
        "K and V of the newest position are empty": (
            np.concatenate([keys[:, :-1], zero], 1),
            np.concatenate([values[:, :-1], zero], 1),
        ),
    }
    for text, (k, v) in mistakes.items():
        if not k.shape[1]:
            continue
        wrong = layer.truth.join_heads(plain_attention(query, k, v, causal=False))
        if relative(rows, wrong) <= 2 * HOST_LIMIT:
            return f"; {text}"
    return ""
