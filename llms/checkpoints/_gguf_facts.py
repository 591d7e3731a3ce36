"""What a GGUF file says about its model, and the comparison of a converted folder with it.

Key names are those of the GGUF specification (ggml-org/ggml, ``docs/gguf.md``). A key that is missing is an
error: a default here would be a silent wrong rope base or norm epsilon there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llms.checkpoints._types import CheckpointError

# GGUF architecture -> model_type of transformers.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_REMEDY = "use the original HF folder (config.json, safetensors, tokenizer) instead of this GGUF"


@dataclass(frozen=True)
class GGUFFacts:
    """Metadata of one GGUF file, read by the ``gguf`` package and checked for completeness.

    ``config`` holds the fields of ``config.json`` that the file determines.
    """

    architecture: str
    config: Mapping[str, Any]
    tokens: tuple[str, ...]
    control_ids: tuple[int, ...]
    pre_tokenizer: str
    special_ids: Mapping[str, int]
    chat_template: str | None
    adds_bos: bool


def shortest_decimal(value: float) -> float:
    """Return the shortest decimal that is the same float32: GGUF keeps 1e-5 as float32 9.99999974e-06."""
    return float(np.format_float_scientific(np.float32(value), unique=True))


def read_facts(path: Path) -> GGUFFacts:
    """Read and check the metadata of a GGUF file.

    Raises:
        CheckpointError: not a GGUF, truncated, an architecture we do not convert, or a key is missing.
    """
    reader = open_gguf(path)
    fields = reader.fields

    def get(key: str) -> Any:
        if key not in fields:
            raise CheckpointError(f"has no metadata key {key!r}", path=path, remedy=_REMEDY)
        return fields[key].contents()

    architecture = str(get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"has architecture {architecture!r}; converted are {', '.join(sorted(ARCHITECTURES))}",
            path=path,
            remedy=_REMEDY,
        )
    names = {tensor.name for tensor in reader.tensors}
    if "rope_freqs.weight" in names or any(".rope.scaling." in key for key in fields):
        raise CheckpointError(
            "carries rope scaling, which the conversion to HF form would lose", path=path, remedy=_REMEDY
        )
    tokens = tuple(get("tokenizer.ggml.tokens"))
    heads, width = (
        int(get(f"{architecture}.attention.head_count")),
        int(get(f"{architecture}.embedding_length")),
    )
    key_length = f"{architecture}.attention.key_length"
    head_dim = int(get(key_length)) if key_length in fields else width // heads
    rotated = f"{architecture}.rope.dimension_count"
    if rotated in fields and int(get(rotated)) != head_dim:
        raise CheckpointError(
            f"rotates {get(rotated)} of {head_dim} dimensions per head (partial rotary)",
            path=path,
            remedy=_REMEDY,
        )
    config = {
        "model_type": ARCHITECTURES[architecture],
        "num_hidden_layers": int(get(f"{architecture}.block_count")),
        "hidden_size": width,
        "intermediate_size": int(get(f"{architecture}.feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get(f"{architecture}.attention.head_count_kv")),
        "head_dim": head_dim,
        "vocab_size": len(tokens),
        "max_position_embeddings": int(get(f"{architecture}.context_length")),
        "rms_norm_eps": shortest_decimal(get(f"{architecture}.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest_decimal(get(f"{architecture}.rope.freq_base")),
        "tie_word_embeddings": "output.weight" not in names,
    }
    special = {
        name: int(get(f"tokenizer.ggml.{key}"))
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("pad_token", "padding_token_id"),
            ("unk_token", "unknown_token_id"),
        )
        if f"tokenizer.ggml.{key}" in fields
    }
    if "eos_token" not in special:
        raise CheckpointError("has no end-of-text token id", path=path, remedy=_REMEDY)
    types = get("tokenizer.ggml.token_type")
    adds_bos = "tokenizer.ggml.add_bos_token"
    template = "tokenizer.chat_template"
    return GGUFFacts(
        architecture=architecture,
        config=config,
        tokens=tokens,
        control_ids=tuple(index for index, kind in enumerate(types) if kind == 3),  # 3: CONTROL
        pre_tokenizer=str(get("tokenizer.ggml.pre")) if "tokenizer.ggml.pre" in fields else "",
        special_ids=special,
        chat_template=str(get(template)) if template in fields else None,
        adds_bos=bool(get(adds_bos)) if adds_bos in fields else False,
    )


def open_gguf(path: Path) -> Any:
    """Open a GGUF file with ``gguf.GGUFReader``; any failure becomes a :class:`CheckpointError`."""
    import gguf

    try:
        return gguf.GGUFReader(path)
    except FileNotFoundError:
        raise CheckpointError("does not exist", path=path, remedy="check the path of --checkpoint") from None
    except Exception as error:  # the reader indexes a memory map: a cut file shows as almost any exception
        raise CheckpointError(
            f"is truncated or no GGUF file ({type(error).__name__}: {error})",
            path=path,
            remedy="fetch the file again",
        ) from error


def compare_config(facts: GGUFFacts, written: Mapping[str, Any], path: Path) -> None:
    """Compare every field that the GGUF determines with the converted ``config.json``.

    Raises:
        CheckpointError: naming each field that differs or is missing.
    """
    flat = dict(written)
    rope = flat.get("rope_parameters") or {}
    flat.setdefault("rope_theta", rope.get("rope_theta"))
    wrong = [
        f"{name} is {flat.get(name)!r}, the GGUF says {value!r}"
        for name, value in facts.config.items()
        if flat.get(name) != value or type(flat.get(name)) is not type(value)
    ]
    if rope.get("rope_type", "default") != "default" or flat.get("rope_scaling"):
        wrong.append(f"rope scaling {rope or flat.get('rope_scaling')!r} appeared, the GGUF has none")
    if "quantization_config" in flat:
        wrong.append("quantization_config is still there, weights are bf16")
    if wrong:
        raise CheckpointError(
            "conversion and GGUF disagree: " + "; ".join(wrong),
            path=path,
            remedy="this is a fault of the converter or of transformers; " + _REMEDY,
        )
