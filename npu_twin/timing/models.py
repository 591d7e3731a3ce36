"""Published or own model measurements: reading them, and what they say to the predictor.

A file holds `{"models": [...], "breakdown": [...]}` as in `npu_twin/data/published_models.json`
(Xilinx/mlir-air e972f2942, snapshot 2026-08-22). The breakdown may be missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from npu_twin.extensions import model_config
from npu_twin.timing.model_config import LARGEST, ModelSizes

PUBLISHED_MODELS = Path(__file__).resolve().parent.parent / "data" / "published_models.json"


@dataclass(frozen=True)
class ProgramTime:
    """A published time of one program call of a model, in milliseconds; with or without its buffer writes."""

    section: str
    program: str
    ms: float
    with_writes: bool


@dataclass(frozen=True)
class ModelRecord:
    """Published figures of one model with bf16 weights.

    Attributes:
        id: identifier in its file.
        sizes: what the timing depends on.
        seq_len: compiled prefill length.
        ttft_s: published figures of the time to first token; empty when there is none.
        decode_ms: published figures of the time per output token; empty when there is none.
        device_s: published time of all program calls of the prefill with their transfers, or None.
        between_calls_ms: published time of the interpreter between the calls of the prefill, or None.
        programs: published times of single programs.
    """

    id: str
    sizes: ModelSizes
    seq_len: int
    ttft_s: tuple[float, ...]
    decode_ms: tuple[float, ...]
    device_s: float | None = None
    between_calls_ms: float | None = None
    programs: tuple[ProgramTime, ...] = ()


class ModelFile(NamedTuple):
    """What a file holds; `unjudged` and `left_out` are pairs of id and reason.

    Attributes:
        records: the models with bf16 weights that the predictor is held against.
        unjudged: models with bf16 weights and figures that cannot be.
        left_out: models that the predictor makes no claim about: other weights, or no figure.
    """

    records: list[ModelRecord]
    unjudged: list[tuple[str, str]]
    left_out: list[tuple[str, str]]


def read_models(path: Path) -> ModelFile:
    """Return the models of a file.

    Raises:
        ValueError: naming the file when it is no JSON or has no list of models.
        OSError: when it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    models = content.get("models") if isinstance(content, Mapping) else content
    if not isinstance(models, list) or not models or not all(isinstance(m, Mapping) for m in models):
        raise ValueError(f'{path}: expected {{"models": [...]}} with one object per model')
    breakdown = content.get("breakdown") or [] if isinstance(content, Mapping) else []
    if not isinstance(breakdown, list) or not all(isinstance(b, Mapping) for b in breakdown):
        raise ValueError(f"{path}: the breakdown must be a list of objects")
    found = ModelFile([], [], [])
    for model in models:
        identity = str(model.get("id") or model.get("hf_id") or "?")
        weights = str(model.get("weights") or "bf16")
        own = [b for b in breakdown if b.get("model") == identity]
        if not weights.lower().startswith(("bf16", "bfloat16")):
            found.left_out.append((identity, f"weights {weights}, not bf16"))
            continue
        try:
            record = _record(identity, model, own)
        except (ValueError, TypeError) as error:
            if _has_figures(model):
                found.unjudged.append((identity, str(error)))
            else:
                found.left_out.append((identity, _NO_FIGURES))
        else:
            if record.ttft_s or record.decode_ms:
                found.records.append(record)
            else:
                found.left_out.append((identity, _NO_FIGURES))
    return found


_NO_FIGURES = "no ttft_s and no time per token"


def _has_figures(model: Mapping[str, Any]) -> bool:
    return any(model.get(key) is not None for key in ("ttft_s", "decode_ms_per_token", "decode_tps"))


_PUBLISHED_TOTALS = {
    ("prefill", "ttft"),
    ("prefill", "ttft with tokenizer"),
    ("decode", "time per token"),
}
_BETWEEN = "python and numpy between calls"


def _program_times(breakdown: Iterable[Mapping[str, Any]]) -> Iterator[ProgramTime]:
    """Yield the times of programs in a breakdown; a line without one says nothing about them."""
    for line in breakdown:
        phase, name = str(line.get("phase")), str(line.get("component"))
        if line.get("kind") != "elf" or phase not in ("prefill", "decode"):
            continue
        run, call = (_figure(line, key, name) for key in ("npu_run_ms", "per_call_ms"))
        if run is not None or call is not None:
            yield ProgramTime(phase, name, run if run is not None else call or 0.0, run is None)


def _figure(record: Mapping[str, Any], key: str, where: str = "") -> float | None:
    """A positive number of a record, None when it has none. Raises ValueError naming the field.

    In a line of a breakdown (`where`) 0 stands for a time that was rounded away.
    """
    value = record.get(key)
    if value is None or (where and value == 0 and value is not False):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        line = f"its breakdown, {where}: " if where else ""
        raise ValueError(f"{line}{key} must be a positive number, not {value!r}")
    return float(value)


def _record(identity: str, model: Mapping[str, Any], breakdown: Iterable[Mapping[str, Any]]) -> ModelRecord:
    own = list(breakdown)
    ttft = [figure for figure in [_figure(model, "ttft_s")] if figure is not None]
    decode = [figure for figure in [_figure(model, "decode_ms_per_token")] if figure is not None]
    rate = _figure(model, "decode_tps")
    if not decode and rate is not None:
        decode = [1000.0 / rate]
    for line in own:
        component, phase = str(line.get("component")), str(line.get("phase"))
        total = _figure(line, "total_ms", component) if (phase, component) in _PUBLISHED_TOTALS else None
        if total is not None:
            (ttft if phase == "prefill" else decode).append(total * (1e-3 if phase == "prefill" else 1.0))
    programs = tuple(_program_times(own))
    seq_len = 2048 if model.get("seq_len") is None else model["seq_len"]
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or not 0 < seq_len <= LARGEST:
        raise ValueError(f"seq_len must be a positive whole number, not {seq_len!r}")
    device = _figure(model, "prefill_kernel_s")
    between = [_figure(b, "total_ms", _BETWEEN) for b in own if b.get("component") == _BETWEEN]
    return ModelRecord(
        identity,
        sizes_of(model),
        seq_len,
        tuple(ttft),
        tuple(decode),
        device,
        between[0] if between else None,
        programs,
    )


_SIZES = {
    "n_layers": ("n_layers",),
    "emb": ("emb_dim",),
    "q_heads": ("n_q_heads", "n_heads"),
    "kv_heads": ("n_kv_heads",),
    "head_dim": ("head_dim",),
    "hidden": ("hidden_dim",),
    "vocab": ("vocab_size",),
}
_OUT_OF_SCOPE = {
    "sliding window": "an active sliding window",
    "gelu": "the activation gelu",
    "layernorm": "LayerNorm",
    "partial rotary": "RoPE on a part of a head",
    "longrope": "the RoPE type longrope",
    "yarn": "the RoPE type yarn",
    "experts": "mixture of experts",
    "fused decode": "a decode step in one program",
}
"""Words of a record's `deltas`, its differences from the plain family, and what they stand for."""


def sizes_of(model: Mapping[str, Any]) -> ModelSizes:
    """Sizes of a record: its own fields and, for what they lack, its `config`, an HF config.json as it is.

    Raises ValueError naming a size that is missing, not positive or at odds with another, or saying what of
    the model is out of scope.
    """
    deltas = model.get("deltas") or ()
    words = "; ".join(map(str, [deltas] if isinstance(deltas, str) else deltas)).lower()
    for word, reason in _OUT_OF_SCOPE.items():
        if word in words:
            raise ValueError(
                f"no timing for {reason}: only dense decoder-only models with full attention, RMSNorm, "
                "SwiGLU and RoPE are covered"
            )
    own = {key: value for key, value in model.items() if value is not None}
    config = _config_of(own)
    values = {}
    for name, keys in _SIZES.items():
        candidates = [*(own.get(key) for key in keys), *(getattr(config, key, None) for key in keys)]
        value = next((candidate for candidate in candidates if candidate is not None), None)
        if value is None:
            raise ValueError(
                f"no {keys[0]} (sizes are read from the record or from its config, as in config.json)"
            )
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST:
            raise ValueError(f"{keys[0]} must be a whole number from 1 to {LARGEST}, not {value!r}")
        values[name] = value
    if values["head_dim"] % 2:
        raise ValueError(f"RoPE needs an even head_dim, not {values['head_dim']}")
    if values["q_heads"] % values["kv_heads"]:
        raise ValueError(f"{values['q_heads']} query heads cannot share {values['kv_heads']} key heads")
    bias, norm = (
        bool(own.get(name) or name in words or getattr(config, name, False))
        for name in ("qkv_bias", "qk_norm")
    )
    return ModelSizes(**values, qkv_bias=bias, qk_norm=norm, unpadded_attention=None)


def _config_of(own: Mapping[str, Any]) -> object:
    """What the reader of an installed package makes of a Hugging Face configuration; None without one."""
    config = own.get("config")
    if not isinstance(config, Mapping) and "hidden_size" not in own:
        return None
    fields = {**(config if isinstance(config, Mapping) else {}), **own, "_no_end_token": True}
    try:
        return model_config(fields)
    except Exception as error:  # the twin does not know the reader; a missing one says how to get it
        raise ValueError(f"its config: {error}") from error


def nearest(figures: Iterable[float], value: float) -> float:
    """Return the figure that is nearest to `value`, relative to the figure. Raises ValueError when empty."""
    return min(figures, key=lambda figure: abs(value / figure - 1.0))
