"""Time to first token and per output token of a model from its sizes alone: no weights, no values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from npu_twin.opset import Values
from npu_twin.timing import kernels, system
from npu_twin.timing.model_config import DEVICE_HEAD_DIMS, LARGEST, ModelSizes
from npu_twin.timing.model_programs import (
    Program,
    decode_programs,
    fused_decode,
    head_program,
    merged_ffn,
    prefill_programs,
    transposed_attention,
)
from npu_twin.timing.parameters import current, read_file

_BF16 = 2
BUCKET = 128
"""Prefill is compiled for multiples of this length."""
PUBLISHED_PARAMETERS = (0.4e9, 3.5e9)
PUBLISHED_SEQ_LEN = 2048
WIDTH = 64
RESIDUAL_COPIES = 3
"""Times the host handles the residual stream of a layer: into both halves of the layer and out of it."""
PREFILL = "prefill"
DECODE = "decode"


@dataclass(frozen=True)
class Part:
    """One line of a breakdown: `section` prefill or decode, `kind` elf, bo_write, bo_read or host."""

    section: str
    kind: str
    name: str
    calls: int
    per_call_ms: float

    @property
    def total_ms(self) -> float:
        """Time of all calls."""
        return self.calls * self.per_call_ms


@dataclass(frozen=True)
class Prediction:
    """Predicted times of a model on the device, modelled, not measured.

    Attributes:
        ttft_s: from the start of tokenising to the first token, in seconds.
        decode_ms_per_token: steady-state time per output token, in milliseconds.
        breakdown: what both consist of.
        expected_error: relative error to expect of each: `ttft_s` and `decode_ms_per_token`.
        merged_ffn: output projection and FFN of a prefill layer are one program.
        fused_decode: a decode layer uses the cascade form.
        notes: what of the configuration lies outside of the published measurements, one sentence each; the
            expected error does not cover it.
    """

    ttft_s: float
    decode_ms_per_token: float
    breakdown: tuple[Part, ...]
    expected_error: dict[str, float]
    merged_ffn: bool
    fused_decode: bool
    notes: tuple[str, ...] = ()

    @property
    def prefill_device_s(self) -> float:
        """Time of the program calls of the prefill with their buffer transfers, in seconds."""
        kinds = ("elf", "bo_write", "bo_read")
        return sum(p.total_ms for p in self.breakdown if p.section == PREFILL and p.kind in kinds) * 1e-3


def program_us(p: Values, program: Program) -> float:
    """Return the run time of one call of a program inside a model, as `timing.run_us` has it."""
    return p["program.start_us"] + sum(kernels.launches_us(p, program.launches))


def _write_us(p: Values, program: Program) -> float:
    return sum(p["host.sync_us"] + size / p["host.write_gbps"] * 1e-3 for size in program.written)


def _read_us(p: Values, program: Program) -> float:
    return sum(p["host.sync_us"] + size / p["host.read_gbps"] * 1e-3 for size in program.read)


def _call_parts(p: Values, program: Program, section: str) -> Iterator[Part]:
    name, calls = program.name, program.calls
    yield Part(section, "bo_write", name, calls, _write_us(p, program) * 1e-3)
    run = program_us(p, program) + p["program.context_switch_us"]
    yield Part(section, "elf", name, calls, run * 1e-3)
    yield Part(section, "bo_read", name, calls, _read_us(p, program) * 1e-3)
    yield Part(section, "host", f"dispatch {name}", calls, p["host.dispatch_us"] * 1e-3)


def prefill_parts(p: Values, sizes: ModelSizes, seq_len: int) -> Iterator[Part]:
    """Yield what the time to the first token consists of."""
    layers = sizes.n_layers
    embedding = 2 * _BF16 * seq_len * sizes.emb
    kv = 2 * _BF16 * seq_len * sizes.kv_dim
    yield Part(PREFILL, "host", "tokenize", 1, p["host.tokenize_us"] * 1e-3)
    yield Part(PREFILL, "host", "embed_lookup", 1, embedding / p["host.embed_gbps"] * 1e-6)
    stream = _BF16 * seq_len * sizes.emb
    for program in prefill_programs(sizes, seq_len):
        yield from _call_parts(p, program, PREFILL)
    yield Part(PREFILL, "host", "array copies", layers, RESIDUAL_COPIES * stream / p["host.copy_gbps"] * 1e-6)
    if sizes.host_attention is not None:
        q_dim, kv_dim = sizes.host_attention
        moved, flops = 2 * _BF16 * seq_len * (q_dim + kv_dim), 4 * q_dim * seq_len**2
        yield Part(PREFILL, "host", "prefill_attention_cpu", layers, system.work_us(p, moved, flops) * 1e-3)
    yield Part(PREFILL, "host", "kv_cache_extract", layers, kv / p["host.kv_extract_gbps"] * 1e-6)
    if transposed_attention(sizes):
        turned = 2 * _BF16 * seq_len * (sizes.q_dim + sizes.kv_dim)
        yield Part(PREFILL, "host", "head_first_transposes", layers, turned / p["host.transpose_gbps"] * 1e-6)
    yield Part(PREFILL, "host", "final_rms_norm", 1, p["host.norm_us"] * 1e-3)
    yield from _call_parts(p, head_program(sizes), PREFILL)


def decode_parts(p: Values, sizes: ModelSizes) -> Iterator[Part]:
    """Yield what the time of one decode step consists of."""
    for program in decode_programs(sizes):
        yield from _call_parts(p, program, DECODE)
    yield Part(DECODE, "host", "decode_attention_cpu", sizes.n_layers, p["host.attention_us"] * 1e-3)
    if not fused_decode(sizes):
        yield Part(DECODE, "host", "add_norm_swiglu_cpu", sizes.n_layers, p["host.glue_us"] * 1e-3)
    yield Part(DECODE, "host", "final_rms_norm", 1, p["host.norm_us"] * 1e-3)
    yield from _call_parts(p, head_program(sizes), DECODE)


def times(p: Values, sizes: ModelSizes, seq_len: int) -> tuple[float, float, tuple[Part, ...]]:
    """Return time to first token in seconds, time per output token in milliseconds, and their parts."""
    prefill = tuple(prefill_parts(p, sizes, seq_len))
    decode = tuple(decode_parts(p, sizes))
    return (
        sum(part.total_ms for part in prefill) * 1e-3,
        sum(part.total_ms for part in decode),
        prefill + decode,
    )


def predict(sizes: ModelSizes, seq_len: int = 2048) -> Prediction:
    """Predict the timing of a model on an NPU2 from its sizes.

    Args:
        sizes: of the model as it is deployed.
        seq_len: prefill length in tokens; padded to the next multiple of `BUCKET`, as a deployment does.

    Raises:
        ValueError: for an impossible length.
    """
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or not 0 < seq_len <= LARGEST:
        raise ValueError(f"seq_len must be a whole number from 1 to {LARGEST}, not {seq_len!r}")
    compiled = -(-seq_len // BUCKET) * BUCKET
    ttft, decode, parts = times(current(), sizes, compiled)
    return Prediction(
        ttft,
        decode,
        parts,
        expected_error(),
        merged_ffn(sizes),
        fused_decode(sizes),
        tuple(_notes(sizes, compiled)),
    )


def _notes(sizes: ModelSizes, seq_len: int) -> Iterator[str]:
    """Say what no published measurement is like."""
    if sizes.host_attention is not None:
        yield (
            f"prefill attention on the host: an attention kernel is published for head_dim "
            f"{' and '.join(map(str, DEVICE_HEAD_DIMS))}; the host's time is of its general rates"
        )
    narrow = [
        f"{name} {value}"
        for name, value in (("emb", sizes.emb), ("hidden", sizes.hidden), ("head_dim", sizes.head_dim))
        if value % WIDTH
    ]
    if narrow:
        yield f"widths that are no multiple of {WIDTH} ({', '.join(narrow)}) are padded by a deployment"
    if sizes.parameters > PUBLISHED_PARAMETERS[1] or sizes.parameters < PUBLISHED_PARAMETERS[0]:
        yield (
            f"{sizes.parameters / 1e9:.2g} billion weights; the published models have "
            f"{PUBLISHED_PARAMETERS[0] / 1e9:g} to {PUBLISHED_PARAMETERS[1] / 1e9:g}"
        )
    if seq_len > PUBLISHED_SEQ_LEN:
        yield f"prefill of {seq_len} tokens; models are published up to {PUBLISHED_SEQ_LEN}"


def expected_error() -> dict[str, float]:
    """Return the relative errors to expect: the largest when each published model was left out of the fit."""
    recorded = read_file().get("expected_error", {})
    return {key: float(recorded.get(key, math.nan)) for key in ("ttft_s", "decode_ms_per_token")}
