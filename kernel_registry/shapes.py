"""What a sweep is asked for: a kernel, a shape and the variant, from the command line or a model's config."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_registry.registry_lookup import DIMS, GEMM_METHODS

DEFAULT_BUCKETS = (128, 256, 512, 1024, 2048)
LM_HEAD_PARTITION = 16384
"""Rows of one vocabulary partition where the whole vocabulary has no legal GEMV."""


class RequestError(ValueError):
    """A shape or a shapes file cannot be understood. The message says what was expected."""


@dataclass(frozen=True)
class Request:
    """One kernel at one shape. ``precision`` and ``output_dtype`` concern GEMM, ``causal`` attention;
    ``method`` restricts the implementation, empty for any of the tier.
    """

    op: str
    shape: tuple[int, ...]
    precision: str = "high"
    output_dtype: str = "bf16"
    causal: bool = False
    method: str = ""

    @property
    def dims(self) -> dict[str, int]:
        """Dimensions by name."""
        return dict(zip(DIMS[self.op], self.shape, strict=True))

    @property
    def tier(self) -> str:
        """Tier name of the legal-tile search: ``high``, ``low`` or ``f32``."""
        return "f32" if self.output_dtype == "f32" else self.precision

    def __str__(self) -> str:
        text = f"{self.op} {'x'.join(map(str, self.shape))}"
        if self.op == "gemm":
            text += f" {self.output_dtype} {self.precision}"
        return text + (" causal" if self.causal else "") + (f" {self.method}" if self.method else "")


def parse(
    op: str,
    shape: str,
    *,
    precision: str = "high",
    output_dtype: str = "bf16",
    causal: bool = False,
    method: str = "",
) -> Request:
    """Read a shape such as ``256x576x1536``. Raises RequestError naming the dimensions of the kernel."""
    if op not in DIMS:
        raise RequestError(f"unknown kernel {op!r}; known: {', '.join(DIMS)}")
    names = DIMS[op]
    try:
        sizes = tuple(int(part) for part in str(shape).lower().split("x"))
    except ValueError:
        sizes = ()
    if len(sizes) != len(names) or any(s < 1 for s in sizes):
        raise RequestError(f"{op}: shape {shape!r} must be {'x'.join(names)}, positive integers")
    if op == "gemm" and (output_dtype, precision) not in GEMM_METHODS:
        raise RequestError(f"gemm: no kernel writes {output_dtype} with precision {precision!r}")
    return Request(op, sizes, precision, output_dtype, causal, method)


def from_file(path: Path, buckets: Sequence[int] = DEFAULT_BUCKETS) -> tuple[list[Request], list[str]]:
    """Requests and ``used_by`` tags of a JSON file.

    The file is a Hugging Face ``config.json`` of the Llama family, or
    ``{"used_by": [...], "shapes": [{"op": "gemm", "shape": "256x576x576", "precision": "high"}, ...]}``.
    Raises RequestError.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: {error}") from None
    if isinstance(data, Mapping) and "hidden_size" in data:
        return from_config(data, buckets), []
    if not isinstance(data, Mapping) or not isinstance(data.get("shapes"), list):
        raise RequestError(f"{path}: neither a model's config.json nor an object with a list 'shapes'")
    found = []
    for i, item in enumerate(data["shapes"]):
        try:
            options = {k: v for k, v in item.items() if k not in ("op", "shape")}
            found.append(parse(item["op"], item["shape"], **options))
        except (KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"{path}: shapes[{i}]: needs op and shape ({error!r})") from None
    return list(dict.fromkeys(found)), [str(tag) for tag in data.get("used_by", [])]


def from_config(config: Mapping[str, Any], buckets: Iterable[int] = DEFAULT_BUCKETS) -> list[Request]:
    """Every (kernel, shape) that a Llama-family model launches, for prefill buckets and decode.

    Raises RequestError naming a missing field.
    """
    try:
        emb, hidden = int(config["hidden_size"]), int(config["intermediate_size"])
        heads, vocab = int(config["num_attention_heads"]), int(config["vocab_size"])
    except KeyError as error:
        raise RequestError(f"the model's configuration has no {error.args[0]}") from None
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or emb // heads)
    # Qwen2 has the bias without saying so in its configuration.
    bias = bool(config.get("attention_bias", False)) or config.get("model_type") == "qwen2"
    qk_norm = config.get("model_type") == "qwen3"
    found: list[Request] = []
    for rows in buckets:
        found += _prefill(rows, emb, hidden, heads, kv_heads, head_dim, bias, qk_norm)
    found += _decode(emb, hidden, heads, kv_heads, head_dim, vocab, bias, qk_norm)
    return list(dict.fromkeys(found))


def _prefill(
    m: int, emb: int, hidden: int, heads: int, kv_heads: int, hd: int, bias: bool, qk_norm: bool
) -> Iterator[Request]:
    q, kv = heads * hd, kv_heads * hd
    yield Request("rms_norm", (m, emb))
    for k, n in ((emb, q), (emb, kv), (q, emb), (emb, hidden), (hidden, emb)):
        yield Request("gemm", (m, k, n))
    yield from _heads(m, heads, kv_heads, hd, bias, qk_norm)
    yield Request("flash_attention", (m, m, hd, heads, kv_heads), causal=True)
    yield Request("eltwise_add", (m * emb,))
    yield Request("silu_mul", (m * hidden,))


def _decode(
    emb: int, hidden: int, heads: int, kv_heads: int, hd: int, vocab: int, bias: bool, qk_norm: bool
) -> Iterator[Request]:
    from npu_twin.constraints import gemv_slices

    q, kv = heads * hd, kv_heads * hd
    yield Request("rms_norm", (1, emb))
    for m, k in ((q, emb), (kv, emb), (emb, q), (hidden, emb), (emb, hidden)):
        for part in gemv_slices(m, k) or (k,):
            yield Request("gemv", (m, part))
    yield from _heads(1, heads, kv_heads, hd, bias, qk_norm)
    yield Request("eltwise_add", (emb,))
    yield Request("silu_mul", (hidden,))
    yield Request("gemv", (vocab if _whole_vocabulary(vocab, emb) else LM_HEAD_PARTITION, emb))


def _heads(m: int, heads: int, kv_heads: int, hd: int, bias: bool, qk_norm: bool) -> Iterator[Request]:
    for count in (heads, kv_heads):
        if bias:
            yield Request("bias_add", (m, count * hd))
        if qk_norm:
            yield Request("rms_norm", (m * count, hd))
        yield Request("rope", (m * count, hd))


def _whole_vocabulary(vocab: int, emb: int) -> bool:
    from npu_twin.constraints import legal_configs

    return bool(legal_configs("gemv", {"M": vocab, "K": emb}))
