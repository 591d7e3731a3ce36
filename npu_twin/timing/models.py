"""Published or own model measurements: reading them, and what they say to the predictor.

A file holds `{"models": [...], "breakdown": [...]}` as in `npu_twin/data/published_models.json`
(Xilinx/mlir-air e972f2942, snapshot 2026-08-22). The breakdown may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_twin.timing.model_config import ModelSizes, read_sizes

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


def read_models(path: Path) -> tuple[list[ModelRecord], list[tuple[str, str]]]:
    """Return the bf16 records of a file, and id and reason of those that cannot be judged.

    Records with other weights (quantised) and without any figure are left out silently: they are not claimed.

    Raises:
        ValueError: naming the file when it is no JSON or has no list of models.
        OSError: when it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    models = content.get("models") if isinstance(content, Mapping) else content
    if not isinstance(models, list) or not all(isinstance(m, Mapping) for m in models):
        raise ValueError(f'{path}: expected {{"models": [...]}} with one object per model')
    breakdown = content.get("breakdown") or [] if isinstance(content, Mapping) else []
    records: list[ModelRecord] = []
    unjudged: list[tuple[str, str]] = []
    for model in models:
        if str(model.get("weights", "bf16")) != "bf16":
            continue
        identity = str(model.get("id", "?"))
        if not any(model.get(key) for key in ("ttft_s", "decode_ms_per_token", "decode_tps")):
            continue
        own = [b for b in breakdown if b.get("model") == identity]
        try:
            record = _record(identity, model, own)
        except (ValueError, TypeError) as error:
            unjudged.append((identity, str(error)))
            continue
        records.append(record)
    return records, unjudged


def _record(identity: str, model: Mapping[str, Any], breakdown: Iterable[Mapping[str, Any]]) -> ModelRecord:
    own = list(breakdown)
    ttft = [float(model["ttft_s"])] if model.get("ttft_s") else []
    decode = [float(model["decode_ms_per_token"])] if model.get("decode_ms_per_token") else []
    if not decode and model.get("decode_tps"):
        decode = [1000.0 / float(model["decode_tps"])]
    for line in own:
        component, phase = str(line.get("component")), line.get("phase")
        if phase == "prefill" and component in ("ttft", "ttft with tokenizer"):
            ttft.append(float(line["total_ms"]) * 1e-3)
        if phase == "decode" and component == "time per token":
            decode.append(float(line["total_ms"]))
    programs = tuple(
        ProgramTime(
            str(line["phase"]),
            str(line["component"]),
            float(line.get("npu_run_ms") or line["per_call_ms"]),
            line.get("npu_run_ms") is None,
        )
        for line in own
        if line.get("kind") == "elf" and line.get("phase") in ("prefill", "decode")
    )
    seq_len = int(model.get("seq_len") or 2048)
    device = float(model["prefill_kernel_s"]) if model.get("prefill_kernel_s") else None
    between = [float(b["total_ms"]) for b in own if b.get("component") == "python and numpy between calls"]
    return ModelRecord(
        identity,
        read_sizes(model),
        seq_len,
        tuple(ttft),
        tuple(decode),
        device,
        between[0] if between else None,
        programs,
    )


def nearest(figures: Iterable[float], value: float) -> float:
    """Return the figure that is nearest to `value`, relative to the figure. Raises ValueError when empty."""
    return min(figures, key=lambda figure: abs(value / figure - 1.0))
