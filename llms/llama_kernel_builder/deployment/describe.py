"""What a configuration means on the device, in words and numbers: share, padding, ELFs, expected speed."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llms.llama_kernel_builder.llama_loop import KernelSequence
    from llms.llama_kernel_builder.model_config import ModelConfig
    from npu_twin.timing.model_config import ModelSizes

SEQ_LEN = 2048


@dataclass(frozen=True)
class Share:
    """Operations (multiplications and additions) of matrix products and attention, on the device and in all.

    `prefill_*` is a prompt of `seq_len` tokens, `decode_*` one token at that position.
    """

    seq_len: int
    prefill_device: int
    prefill_total: int
    decode_device: int
    decode_total: int

    @property
    def prefill(self) -> float:
        """Device's part of a prefill, 0 to 1."""
        return self.prefill_device / self.prefill_total

    @property
    def decode(self) -> float:
        """Device's part of a decode step, 0 to 1."""
        return self.decode_device / self.decode_total

    def as_dict(self) -> dict[str, Any]:
        """Fields and fractions as JSON-able data."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**counts, "prefill": round(self.prefill, 6), "decode": round(self.decode, 6)}

    def sentence(self) -> str:
        """Capitalised, with a full stop."""
        text = str(self)
        return f"{text[:1].upper()}{text[1:]}."

    def __str__(self) -> str:
        return (
            f"device's share of the operations: {self.prefill:.1%} of a prefill of {self.seq_len} tokens, "
            f"{self.decode:.1%} of a decode step at that position (all matrix products; decode "
            "attention is on the host)"
        )


def share(config: ModelConfig, seq_len: int = SEQ_LEN) -> Share:
    """Count by the model's real sizes; padding is no useful work and does not count."""
    from llms.llama_kernel_builder.device_config import attends_on_device

    n = min(seq_len, config.max_position)
    per_row = 2 * config.emb_dim * (2 * config.q_dim + 2 * config.kv_dim + 3 * config.hidden_dim)
    products = config.n_layers * per_row
    head = 2 * config.emb_dim * config.vocab_size
    # a query row at position p meets p + 1 keys, for scores and for values
    prefill_attention = config.n_layers * 2 * config.q_dim * n * (n + 1)
    decode_attention = config.n_layers * 4 * config.q_dim * n
    prefill = products * n + head
    return Share(
        n,
        prefill + (prefill_attention if attends_on_device(config) else 0),
        prefill + prefill_attention,
        products + head,
        products + head + decode_attention,
    )


def config_fields(config: ModelConfig) -> list[tuple[str, str]]:
    """Name and source text of every field, in order."""
    return [(field.name, _source(getattr(config, field.name))) for field in fields(config)]


def _source(value: Any) -> str:
    """Python source of a field; a RopeScaling without the fields that its kind does not have."""
    from llms.llama_kernel_builder.model_config import RopeScaling

    if not isinstance(value, RopeScaling):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    needed = {"default": 0, "linear": 2}.get(value.kind, 5)
    parts = [getattr(value, field.name) for field in fields(value)][:needed]
    return f"RopeScaling({', '.join(json.dumps(part) for part in parts)})"


def elf_rows(sequence: KernelSequence, config: ModelConfig, seq_len: int) -> tuple[list[str], list[str], int]:
    """Rows `name | launches` of the ELFs of a prefill layer and a decode layer; partitions of the LM head."""
    from llms.llama_kernel_builder.kernels import recording

    with recording():
        prefill = list(sequence.prefill_blocks(config, seq_len))
        decode = list(sequence.decode_blocks(config))
        head = sequence.lm_head(config)
    rows = [
        [f"| `{block.name}` | {', '.join(step.label for step in block.steps)} |" for block in blocks]
        for blocks in (prefill, decode)
    ]
    return rows[0], rows[1], len(head.steps)


@dataclass(frozen=True)
class Speed:
    """Predicted times on the device clock, modelled; errors are relative."""

    seq_len: int
    ttft_ms: float
    tpot_ms: float
    ttft_error: float
    tpot_error: float
    breakdown: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()

    @property
    def tps(self) -> float:
        """Tokens per second in steady state."""
        return 1e3 / self.tpot_ms

    def as_dict(self) -> dict[str, Any]:
        """JSON-able data without the breakdown."""
        error = {"ttft": self.ttft_error, "tpot": self.tpot_error}
        times = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "tps": self.tps}
        return {"device": "twin (modelled)", "seq_len": self.seq_len, **times, "expected_error": error}

    def __str__(self) -> str:
        return (
            f"TTFT {self.ttft_ms:.0f} ms ± {self.ttft_error:.0%} for a prompt of {self.seq_len} tokens, "
            f"{self.tps:.1f} tokens/s ({self.tpot_ms:.1f} ms per token ± {self.tpot_error:.0%}), "
            "twin (modelled)"
        )


def speed(config: ModelConfig, seq_len: int = SEQ_LEN) -> Speed:
    """Predict from the sizes on the device."""
    from npu_twin import timing

    n = max(1, min(seq_len, config.max_position))
    predicted = timing.predict(_device_sizes(config), n)
    columns = ("section", "kind", "name", "calls", "total_ms", "per_call_ms")
    rows = tuple({key: getattr(part, key) for key in columns} for part in predicted.breakdown)
    error = predicted.expected_error
    times = (predicted.ttft_s * 1e3, predicted.decode_ms_per_token)
    return Speed(n, *times, error["ttft_s"], error["decode_ms_per_token"], rows, predicted.notes)


def _device_sizes(config: ModelConfig) -> ModelSizes:
    """Sizes on the device. Padded query heads need not be shared evenly by padded key heads: such heads are
    attended on the host, without the padding.
    """
    from llms.llama_kernel_builder.device_config import attends_on_device, device_config
    from npu_twin.timing.model_config import ModelSizes

    c = device_config(config)
    unpadded = None if attends_on_device(config) else (config.q_dim, config.kv_dim)
    heads = (c.n_heads, c.n_kv_heads, c.head_dim)
    return ModelSizes(
        c.n_layers, c.emb_dim, *heads, c.hidden_dim, c.vocab_size, c.qkv_bias, c.qk_norm, unpadded
    )


def published(config: ModelConfig) -> dict[str, Any] | None:
    """The published silicon record (Xilinx/mlir-air e972f2942) of a model of exactly these sizes, if any."""
    from llms.llama_kernel_builder.model_config import SIZES
    from npu_twin.timing.models import PUBLISHED_MODELS

    sizes = {"n_q_heads" if name == "n_heads" else name: getattr(config, name) for name in SIZES}
    records: list[dict[str, Any]] = json.loads(PUBLISHED_MODELS.read_text(encoding="utf-8"))["models"]
    for record in records:
        same = all(record[name] == size for name, size in sizes.items())
        if same and record.get("weights", "bf16") == "bf16" and record.get("ttft_s"):
            return record
    return None


def speed_table(config: ModelConfig) -> list[str]:
    """Markdown: predicted next to published, each labelled with what it is."""
    expected = speed(config)
    rows = [
        f"| | TTFT, {expected.seq_len} tokens | tokens/s | ms per token |",
        "|---|---|---|---|",
        f"| predicted, twin (modelled), ± {expected.ttft_error:.0%} / {expected.tpot_error:.0%} | "
        f"{_duration(expected.ttft_ms)} | {expected.tps:.1f} | {expected.tpot_ms:.1f} |",
    ]
    silicon = published(config)
    if silicon is None:
        rows += ["", "No silicon figure is published for this model."]
        return rows
    rows.append(
        f"| published, {silicon['device']}, {silicon['date']} (Xilinx/mlir-air e972f2942) | "
        f"{_duration(silicon['ttft_s'] * 1e3)} | {silicon['decode_tps']:.1f} | "
        f"{silicon['decode_ms_per_token']:.1f} |"
    )
    return rows


def _duration(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.0f} ms"
