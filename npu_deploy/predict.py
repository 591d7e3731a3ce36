"""`npu-deploy predict`: TTFT and tokens per second from a configuration, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llms.llama_kernel_builder.deployment import describe
from npu_deploy import folders
from npu_deploy.answer import Answer
from npu_deploy.errors import BAD_CHECKPOINT, OUT_OF_SCOPE, DeployError

_LONGEST = 12


def predict_source(source: str, seq_len: int = describe.SEQ_LEN) -> Answer:
    """Predict for a config.json, an HF folder, an HF id in the local cache, or a model of `npu-deploy list`.

    Raises DeployError: out of scope, unreadable, or nothing of that name.
    """
    from llms.llama_kernel_builder.device_config import deviations
    from llms.llama_kernel_builder.exceptions import ConfigError, OutOfScope

    try:
        config, sequence = _source(source)
    except OutOfScope as error:
        raise DeployError(str(error), OUT_OF_SCOPE) from error
    except ConfigError as error:
        raise DeployError(str(error), BAD_CHECKPOINT) from error
    expected, part = describe.speed(config, seq_len), describe.share(config, seq_len)
    silicon = describe.published(config)
    own = _own(sequence, config, expected.seq_len) if sequence is not None else None
    data = {
        "source": source,
        **expected.as_dict(),
        "breakdown": list(expected.breakdown),
        "share": part.as_dict(),
        "notes": list(expected.notes),
        "own_programs": own,
        "deviations": deviations(config),
        "published": silicon,
    }
    lines = [f"{expected}, in the published flow, where the result of every program visits the host"]
    lines += [f"beyond what is published, so the error may be larger: {note}" for note in expected.notes]
    if own is not None:
        lines.append(
            "the programs of this folder, whose activations stay on the device: "
            f"TTFT {own['ttft_ms']:.0f} ms, {1e3 / own['tpot_ms']:.1f} tokens/s ({own['tpot_ms']:.1f} ms per "
            "token), twin (modelled)"
        )
    lines.append(str(part))
    lines += [f"deviation: {line}" for line in deviations(config)]
    if silicon:
        lines.append(
            f"published silicon ({silicon['device']}, {silicon['date']}): TTFT {silicon['ttft_s']:.2f} s for "
            f"{silicon['seq_len']} tokens, {silicon['decode_tps']:.1f} tokens/s"
        )
    if expected.seq_len < seq_len:
        lines.append(f"the model takes {config.max_position} positions: {seq_len} tokens were cut to that")
    lines += ["", f"{'section':8} {'kind':9} {'name':28} {'calls':>6} {'total ms':>9} {'ms each':>8}"]
    rows = sorted(expected.breakdown, key=lambda row: (row["section"] != "prefill", -row["total_ms"]))
    for section in ("prefill", "decode"):
        mine = [row for row in rows if row["section"] == section]
        lines += [
            f"{row['section']:8} {row['kind']:9} {row['name']:28} {row['calls']:6} {row['total_ms']:9.2f} "
            f"{row['per_call_ms']:8.3f}"
            for row in mine[:_LONGEST]
        ]
        rest = sum(row["total_ms"] for row in mine[_LONGEST:])
        if rest:
            lines.append(f"{section:8} {len(mine) - _LONGEST} smaller ones {'':31} {rest:9.2f}")
    return Answer(data, tuple(lines))


def _own(sequence: Any, config: Any, seq_len: int) -> dict[str, float] | None:
    """TTFT and TPOT of a model folder's own programs, ms; None where a kernel has no registry row."""
    from kernel_registry.registry_lookup import UnmeasuredShape
    from llms.llama_kernel_builder.deployment.predicted import predicted_time

    try:
        found = predicted_time(sequence, config, seq_len)
    except UnmeasuredShape:
        return None
    return {"ttft_ms": found.ttft_ms, "tpot_ms": found.decode_ms}


def _source(source: str) -> tuple[Any, Any]:
    """The configuration, and the kernel sequence where the source is a model folder (else None)."""
    from llms.llama_kernel_builder.model_config import ModelConfig

    path = Path(source).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return ModelConfig.from_hf_folder(path), None
    if path.is_file():
        return ModelConfig.from_config_file(path), None
    cached = _cached_config(source)
    if cached is not None:
        return ModelConfig.from_config_file(cached), None
    try:
        model = folders.find(source)
    except DeployError:
        raise DeployError(
            f"{source} is no config.json, no HF folder, no model of `npu-deploy list`, and not in the local "
            f"HF cache; fetch its configuration with: hf download {source} config.json",
            BAD_CHECKPOINT,
        ) from None
    from llms.verify.contract.deployment import load_adapter

    adapter = load_adapter(model.folder)
    return adapter.CONFIG, adapter.inference.SEQUENCE


def _cached_config(hf_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if hf_id.count("/") != 1:
        return None
    try:
        found = try_to_load_from_cache(hf_id, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
