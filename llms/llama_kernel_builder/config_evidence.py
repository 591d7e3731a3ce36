"""Configuration fields that a config.json lacks, read from the weights and the tokenizer beside it.

Older files leave out what their library took for granted (`num_key_value_heads`, `attention_bias`,
`tie_word_embeddings`), and many Qwen configurations leave the end token to the tokenizer. The weights and
the tokenizer know; nothing is assumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LAYER0 = "model.layers.0.self_attn."


def from_evidence(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The same mapping with absent fields filled in where weight shapes or the tokenizer decide them."""
    found = dict(data)
    if not _has_end_token(found):
        ids = _tokenizer_end_token(folder)
        found["_generation_eos"] = ids
        found["_no_end_token"] = ids is None
    wanted = ("num_key_value_heads", "attention_bias", "tie_word_embeddings")
    if any(found.get(name) is None for name in wanted):
        _from_shapes(found, folder)
    return found


def _has_end_token(data: Mapping[str, Any]) -> bool:
    return any(data.get(name) not in (None, []) for name in ("eos_token_id", "_generation_eos"))


def _from_shapes(data: dict[str, Any], folder: Path) -> None:
    from llms.checkpoints import CheckpointError, tensor_table

    try:
        table = tensor_table(folder)
    except CheckpointError:
        return
    keys = table.get(f"{_LAYER0}k_proj.weight")
    heads, width = data.get("num_attention_heads"), data.get("hidden_size")
    if data.get("num_key_value_heads") is None and keys is not None and heads and width:
        head_dim = int(data.get("head_dim") or width // heads)
        if head_dim and keys.shape[0] % head_dim == 0:
            data["num_key_value_heads"] = keys.shape[0] // head_dim
    if data.get("attention_bias") is None and keys is not None:
        data["attention_bias"] = f"{_LAYER0}o_proj.bias" in table
    if data.get("tie_word_embeddings") is None and "model.embed_tokens.weight" in table:
        data["tie_word_embeddings"] = "lm_head.weight" not in table


def _tokenizer_end_token(folder: Path) -> int | None:
    """Id of the `eos_token` that tokenizer_config.json names, from the tokenizer's own tables."""
    settings = _json(folder / "tokenizer_config.json")
    token = settings.get("eos_token")
    if isinstance(token, Mapping):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    for key, entry in (settings.get("added_tokens_decoder") or {}).items():
        if entry.get("content") == token:
            return int(key)
    tokenizer = _json(folder / "tokenizer.json")
    for entry in tokenizer.get("added_tokens") or ():
        if entry.get("content") == token:
            return int(entry["id"])
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or _json(folder / "vocab.json")
    found = vocabulary.get(token) if isinstance(vocabulary, Mapping) else None
    return None if found is None else int(found)


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
